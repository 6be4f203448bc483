//! Clients, servers and programs that break the rules, against the real daemon and server on softgpu.

mod hostile;
mod hostile_close;
mod hostile_graph_sizes;
mod hostile_graphs;
mod hostile_images;
mod hostile_lengths;
mod hostile_limits;
mod hostile_logs;
mod hostile_memory;
mod hostile_proc;
mod hostile_rewrites;
mod hostile_streams;
mod hostile_takeover;
