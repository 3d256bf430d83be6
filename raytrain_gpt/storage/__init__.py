"""Where bytes are: disks, object stores and hubs behind one class, and who may write."""
