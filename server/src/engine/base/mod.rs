//! Types that depend on neither a device nor a session: accounting, the driver's functions, handles.

pub mod account;
pub mod assertions;
pub mod bounds;
pub mod call;
pub mod call_error;
pub mod calm;
pub mod description;
pub mod driver;
pub mod graph_templates;
pub mod graph_turns;
pub mod health;
pub mod jit;
pub mod keeping;
pub mod kinds;
pub mod memory_file;
pub mod moment;
pub mod ordinal;
pub mod owners;
pub mod printing;
pub mod progress;
pub mod ranges;
pub mod rations;
pub mod side;
pub mod slots;
pub mod waits;
