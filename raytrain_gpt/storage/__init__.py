"""Where bytes are: disks, object stores, web servers and hubs behind one class, and who may write."""
