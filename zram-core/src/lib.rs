//! zram's store in user space: slot table, compressed page arena, codecs.
