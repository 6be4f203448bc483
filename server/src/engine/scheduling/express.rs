//! The express ring: copies of pages of managed memory, which a thread of the client waits for in the middle of an
//! instruction.
//!
//! They pass the command ring, because messages there may wait: for work in flight, or for a host function that is waiting
//! for such a page itself. Their stream is one that no other message names.

use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::base::driver::is_sticky;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::message::{Copy, Op, Side};
use std::sync::atomic::Ordering;

/// Most messages per visit.
const BUDGET: usize = 64;

/// What a visit to an express ring has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// It was empty.
    Nothing,
    /// Messages were executed.
    Some,
    /// The next message waits for work in flight.
    Full,
}

impl Session {
    /// Executes the messages of the express ring.
    ///
    /// # Errors
    /// The reason why the session ends: a message that is none of these, or a copy that failed, since the client would
    /// take old bytes for new ones.
    #[inline]
    pub fn serve_express(&mut self, shared: &Shared) -> Result<Served, String> {
        if !self.inbox.express.has_message() {
            return Ok(Served::Nothing);
        }
        self.serve_waiting(shared)
    }

    #[cold]
    fn serve_waiting(&mut self, shared: &Shared) -> Result<Served, String> {
        for count in 0..BUDGET {
            let peeked = self.inbox.express.peek();
            let Some(found) = peeked.map_err(|violation| violation.to_string())? else {
                break;
            };
            let full = match count {
                0 => Served::Full,
                _ => Served::Some,
            };
            // Work in flight may wait for a host function that waits for this page: then a quiescent point that waits for
            // the work must not hold the page back.
            if !self.shared.at_work.load(Ordering::SeqCst) && !self.may_work(&shared.gpu) {
                return Ok(full);
            }
            let mut copy = vec![0; found.len as usize];
            let _ = self.inbox.express.copy_out(&found, 0, &mut copy);
            let op = Op::from_u16(found.op).filter(|op| matches!(op, Op::Copy | Op::Mark));
            let op = op.ok_or_else(|| format!("opcode {} in the express ring", found.op))?;
            let message = Incoming::copied(op, found.token, &copy);
            let done = match op {
                Op::Copy => message
                    .body()
                    .and_then(|body| self.move_managed(shared, body)),
                _ => message.body().and_then(|body| self.mark(shared, body)),
            };
            match done {
                Ok(()) => self.inbox.express.consume(&found),
                Err(CallError::Full | CallError::Alone) => return Ok(full),
                Err(CallError::Violation(why)) => return Err(why),
                Err(CallError::Status(status)) => {
                    if is_sticky(status) {
                        self.take_back_begun();
                    }
                    shared.gpu.note_status(status);
                    if shared.gpu.is_lost() && self.shared.goes_on(&shared.gpu) {
                        return Ok(Served::Full);
                    }
                    return Err(format!("managed memory was not copied: {status}"));
                }
            }
        }
        Ok(Served::Some)
    }

    /// Copies a part of managed memory, and counts that.
    fn move_managed(&mut self, shared: &Shared, body: Copy) -> Result<(), CallError> {
        self.copy(shared, body)?;
        // A side that is none is an error of `copy`.
        if let Some(to) = Side::from_u8(body.sides as u8) {
            self.flow.counts.managed.add(to, body.len);
        }
        Ok(())
    }
}
