"""Workers as Ray actors, on one node or many. Imported only where `cluster=ray` is chosen; needs `interlace[ray]`."""
