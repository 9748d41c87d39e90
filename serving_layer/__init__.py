"""Where the arms rejoin: the merger, the difference of the layers, queries and status."""
