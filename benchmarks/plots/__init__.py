"""Drawings of recorded results and of a recorded round."""
