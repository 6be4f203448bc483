//! Why a message was not executed.

use mpsshim_api::cuda::CUresult;
use mpsshim_proto::ring::Violation;
use thiserror::Error;

/// Why a message was not executed.
#[derive(Debug, Error)]
pub enum CallError {
    /// The driver, or a check in its place, refused: the client gets the status.
    #[error("{0}")]
    Status(#[from] CUresult),
    /// It has to wait: its stream has reached its limit of work in flight, or another session prints.
    #[error("has to wait for work in flight")]
    Full,
    /// It must be executed while nothing is in flight: see [`crate::engine::threads::gate`].
    #[error("has to wait until nothing is in flight")]
    Alone,
    /// The client broke the protocol: its session ends.
    #[error("{0}")]
    Violation(String),
}

impl From<Violation> for CallError {
    fn from(violation: Violation) -> Self {
        CallError::Violation(violation.to_string())
    }
}
