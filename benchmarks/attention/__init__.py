"""One attention call: this project's CUDA plugins beside every peer, on one GPU."""
