//! A small CUDA driver for the CPU, for the demo and the tests.
//!
//! `libsoftgpu.so` has the SONAME of the genuine driver and exports those of its entry points that the demo and the
//! tests need. A launch goes `launch` (parameters packed, limits
//! checked) -> `stream` (queued; the stream's thread takes it) -> `interp` (blocks and threads run) over the
//! code that `module` had `ptx` make from the text that `image` found.
//!
//! Environment: SOFTGPU_DEVICES (how many, default 1), SOFTGPU_MEMORY (bytes per device, with K, M or G,
//! default 4G), SOFTGPU_GREEN (0: no green contexts), SOFTGPU_DRIVER_LOCKS (1: calls wait for work in flight, and keep
//! others out, as the genuine driver's do: `driver_locks`), SOFTGPU_LATE_COPIES (microseconds by which asynchronous copies
//! of pageable memory to a device begin late, default 0), SOFTGPU_ENDS_AT (a text: the load of an image that contains it
//! ends the process), SOFTGPU_HANGS_AT (a text: that load never returns), SOFTGPU_LOG (anything but 0: errors and refusals to standard
//! error).

#![allow(non_snake_case)]

mod api;
mod array;
mod compute_mode;
mod condition;
mod context;
mod copy;
mod counts;
mod device;
mod driver;
mod driver_locks;
mod event;
mod external;
mod graph;
mod graph_attribute;
mod green;
mod heap;
mod image;
mod interp;
mod launch;
mod library;
mod link;
mod lookup;
mod memory;
mod module;
mod node_memory;
mod pool;
mod ptx;
mod stream;
mod texture;
