//! Stream memory operations, stream attributes, host functions.
