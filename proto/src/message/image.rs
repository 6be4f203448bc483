//! The linker and what else concerns code.
