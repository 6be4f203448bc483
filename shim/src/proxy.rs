//! Proxy mode: calls are messages to the server. [`calls`] has a handler for each symbol; the other modules are the
//! session and the client-side state of contexts, streams, memory and the other objects.

pub mod array;
pub mod calls;
pub mod capture;
pub mod context;
pub mod copying;
pub mod default_stream;
pub mod event;
pub mod extents;
#[cfg(test)]
pub mod fake;
pub mod graph;
pub mod graph_host;
pub mod hostfn;
pub mod image;
pub mod jit;
pub mod known;
pub mod library;
pub mod managed;
pub mod maps;
#[cfg(test)]
mod marks_tests;
pub mod memory;
pub mod module;
pub mod objects;
pub mod own_stack;
pub mod pages;
pub mod pool;
pub mod pools;
pub mod printing;
pub mod private_pages;
pub mod register;
pub mod replay;
pub mod shadow;
pub mod sleepers;
pub mod slots;
pub mod staging;
pub mod stream;
pub mod submit;
pub mod tables;
pub mod teardown;
pub mod user_object;
pub mod virtual_memory;
pub mod wait;
pub mod waited;
