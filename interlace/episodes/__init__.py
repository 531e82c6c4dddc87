"""Episodes: how one sample comes to be. One file each; your own is a class with the same method."""
