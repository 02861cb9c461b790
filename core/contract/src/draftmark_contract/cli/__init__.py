"""Commands of this distribution: `draftmark contract`, `draftmark judge`, `draftmark prove` and `draftmark bench`."""
