"""Serving benchmark: a server of the unmodified engine from empty caches, and a client with drawn arrivals."""
