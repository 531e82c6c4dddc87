"""Encodings of weights, one file each; base.py defines the interface of a codec."""
