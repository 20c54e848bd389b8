//! A vhost-user virtio-blk device over zram-core.
#![forbid(unsafe_code)]
