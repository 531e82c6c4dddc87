"""Kernels and the decoder for CPU cores, compiled from C++ on first use."""
