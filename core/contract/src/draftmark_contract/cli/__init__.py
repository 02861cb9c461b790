"""Commands of this distribution: `draftmark contract`, `draftmark judge` and `draftmark bench`."""
