"""Pages of docs/ that are made from data, and the site that `make docs` builds."""
