//! Payloads of answers.

use crate::engine::base::call_error::CallError;
use mpsshim_api::cuda::CUresult;
use mpsshim_proto::message::Value;
use zerocopy::IntoBytes;

/// Payload of an answer.
pub type Reply = Result<Vec<u8>, CallError>;

/// Status and payload of a load or a link: a failure has logs too.
pub type Logged = Result<(Result<(), CUresult>, Vec<u8>), CallError>;

/// Payload of an answer that is one number.
pub(super) fn number(value: u64) -> Vec<u8> {
    Value { value }.as_bytes().to_vec()
}
