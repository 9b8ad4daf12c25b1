"""Raw pools: one pool on a block device, a partition or a fixed file, without a file system."""
