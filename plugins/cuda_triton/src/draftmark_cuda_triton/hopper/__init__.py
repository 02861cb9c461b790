"""Kernels for Hopper (sm_90) in Gluon: a warp that fetches keys ahead, and warp groups that fold them in."""
