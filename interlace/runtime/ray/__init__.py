"""Workers as Ray actors, on one node or many. Imported only if `cluster=ray` is chosen; needs `interlace[ray]`."""
