//! Pools, virtual memory, managed, shared and registered memory.
