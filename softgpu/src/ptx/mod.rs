//! PTX: text in, a `Program` of register-indexed instructions out.

mod alu;
pub mod code;
mod emit;
mod lex;
mod parse;

pub use parse::parse;

/// Why a module was refused: what stands in the text, and on which line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PtxError {
    pub line: u32,
    pub reason: String,
}

impl std::fmt::Display for PtxError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}
