"""Place where the project is published: one variable fills the URLs of every wheel.

The pyproject.toml files name a repository that cannot exist. `make release REPOSITORY=https://…` replaces it in the
copy that is built. `URLS` follow from it.
"""

from __future__ import annotations

PLACEHOLDER = "https://repository.invalid/draftmark"
"""Repository in every pyproject.toml. `.invalid` never resolves (RFC 2606)."""
AUTHORS = "The draftmark authors"
"""Authors of every distribution, and holder in LICENSE."""
URLS = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
"""URLs of every distribution, after the repository."""


def urls(repository: str = PLACEHOLDER) -> dict[str, str]:
    """Return the table `[project.urls]` of every distribution.

    Raises:
        ValueError: the repository is not an https URL without a slash at its end.
    """
    if not repository.startswith("https://") or repository.endswith("/") or " " in repository:
        raise ValueError(f"REPOSITORY is {repository!r}; write an https URL without a slash at its end")
    return {name: repository + path for name, path in URLS.items()}


def filled(pyproject: str, repository: str) -> str:
    """Return the text of a pyproject.toml with the repository in place of the placeholder.

    Raises:
        ValueError: the repository is no URL, or the text has no placeholder.
    """
    urls(repository)
    if PLACEHOLDER not in pyproject:
        raise ValueError(f"a pyproject.toml has no URL that begins with {PLACEHOLDER}")
    return pyproject.replace(PLACEHOLDER, repository)
