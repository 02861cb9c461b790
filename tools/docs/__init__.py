"""Writers of the pages of docs/ that are made from data, and of the site that `make docs` builds."""
