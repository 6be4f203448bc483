//! The express ring: copies of pages of managed memory, which a thread of the client waits for in the middle of an
//! instruction.
//!
//! They pass the command ring, because messages there may wait: for work in flight, or for a host function that is waiting
//! for such a page itself. No other message names their stream.

use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::base::driver::is_sticky;
use crate::engine::base::journal::Refusal;
use crate::engine::calls::{copy, stream};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::message::{Copy, Op, Side};
use std::sync::atomic::Ordering;

/// Most messages per visit.
const BUDGET: usize = 64;

/// The outcome of a visit to an express ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// It was empty.
    Nothing,
    /// Messages were executed.
    Some,
    /// The next message waits for work in flight.
    Full,
}

/// Executes the messages of the express ring.
///
/// # Errors
/// The reason why the session ends: a message that is none of these, or a copy that failed, since the client would
/// take old bytes for new ones.
#[inline]
pub fn serve_express(session: &mut Session, shared: &Shared) -> Result<Served, String> {
    if !session.inbox.express.has_message() {
        return Ok(Served::Nothing);
    }
    serve_waiting(session, shared)
}

#[cold]
fn serve_waiting(session: &mut Session, shared: &Shared) -> Result<Served, String> {
    for count in 0..BUDGET {
        let peeked = session.inbox.express.peek();
        let Some(found) = peeked.map_err(|violation| violation.to_string())? else {
            break;
        };
        let full = match count {
            0 => Served::Full,
            _ => Served::Some,
        };
        // Work in flight may wait for a host function that waits for this page: then a quiescent point that waits for
        // the work must not hold the page back.
        if !session.shared.at_work.load(Ordering::SeqCst) && !session.may_work(&shared.gpu) {
            return Ok(full);
        }
        session.note_unrepeatable(Refusal::Managed);
        let mut copy = vec![0; found.len as usize];
        let _ = session.inbox.express.copy_out(&found, 0, &mut copy);
        let op = Op::from_u16(found.op).filter(|op| matches!(op, Op::Copy | Op::Mark));
        let op = op.ok_or_else(|| format!("opcode {} in the express ring", found.op))?;
        let message = Incoming::copied(op, found.token, &copy);
        let done = match op {
            Op::Copy => message
                .body()
                .and_then(|body| move_managed(session, shared, body)),
            _ => message
                .body()
                .and_then(|body| stream::mark(session, shared, body)),
        };
        match done {
            Ok(()) => session.inbox.express.consume(&found),
            Err(CallError::Full | CallError::Alone) => return Ok(full),
            Err(CallError::Violation(why)) => return Err(why),
            Err(CallError::Status(status)) => {
                if is_sticky(status) {
                    session.take_back_begun();
                }
                shared.gpu.note_status(status);
                if shared.gpu.is_lost() && session.shared.goes_on(&shared.gpu) {
                    return Ok(Served::Full);
                }
                return Err(format!("managed memory was not copied: {status}"));
            }
        }
    }
    Ok(Served::Some)
}

/// Copies a part of managed memory, and counts that.
fn move_managed(session: &mut Session, shared: &Shared, body: Copy) -> Result<(), CallError> {
    copy::copy(session, shared, body)?;
    // A side that is none is an error of `copy`.
    if let Some(to) = Side::from_u8(body.sides as u8) {
        session.flow.counts.managed.add(to, body.len);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function, counts, obeys, records};
    use mpsshim_api::cuda::{
        CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    };
    use mpsshim_model::limits::Moved;
    use mpsshim_proto::message::stream::HostFunction;
    use mpsshim_proto::message::{Mark, Object};
    use mpsshim_proto::ring::Producer;
    use mpsshim_proto::segment::RingMemory;
    use zerocopy::{Immutable, IntoBytes};

    const LEN: u64 = 4096;

    /// A session with memory, and the client's ends of its rings.
    struct Desk {
        test: Fixture,
        express: Producer<RingMemory>,
        commands: Producer<RingMemory>,
        stream: u64,
        device: u64,
        host: u64,
    }

    impl Desk {
        fn new(functions: &[(&'static str, Function)]) -> Desk {
            let mut test = Fixture::new(functions);
            let segment = &test.session.shared.segment;
            let (express, commands) = (segment.express(), segment.ring());
            Desk {
                express: Producer::new(express),
                commands: Producer::new(commands),
                stream: test.stream(),
                device: test.memory(LEN),
                host: test.pinned(LEN),
                test,
            }
        }

        fn copy(&self, to: Side) -> Copy {
            let sides = [(Side::Host, self.host), (Side::Device, self.device)];
            let [(from_side, from), (to_side, to)] = match to {
                Side::Device => sides,
                _ => [sides[1], sides[0]],
            };
            Copy {
                to,
                from,
                len: LEN,
                stream: self.stream,
                sides: to_side as u32 | (from_side as u32) << 8,
                pad: 0,
            }
        }

        fn mark(&self) -> Mark {
            Mark {
                stream: self.stream,
                slot: 3,
                value: 7,
            }
        }

        fn sends(&mut self, op: Op, body: &(impl IntoBytes + Immutable)) {
            put(&mut self.express, op, body).expect("room");
        }

        fn serve(&mut self) -> Result<Served, String> {
            serve_express(&mut self.test.session, &self.test.shared)
        }

        /// The reason why the session ends.
        fn ends(&mut self) -> String {
            let served = self.serve();
            let Err(why) = served else {
                panic!("{served:?}");
            };
            why
        }

        fn is_empty(&self) -> bool {
            !self.test.session.inbox.express.has_message()
        }
    }

    /// Writes a message, if the ring has room for it.
    fn put(
        ring: &mut Producer<RingMemory>,
        op: Op,
        body: &(impl IntoBytes + Immutable),
    ) -> Option<()> {
        let room = ring.reserve(body.as_bytes().len())?;
        ring.fill(room, 0, body.as_bytes());
        ring.publish(room, op as u16, 0, 0);
        Some(())
    }

    const COPIES: [(&str, Function); 3] = [
        ("cuMemcpyHtoDAsync_v2", records as Function),
        ("cuMemcpyDtoHAsync_v2", records as Function),
        ("cuStreamWriteValue32_v2", counts as Function),
    ];

    #[test]
    fn copies_and_marks_are_executed_in_their_order_and_counted() {
        let mut desk = Desk::new(&COPIES);
        assert_eq!(desk.serve(), Ok(Served::Nothing));
        let (to_host, to_device) = (desk.copy(Side::Host), desk.copy(Side::Device));
        for copy in [to_host, to_device, to_host] {
            desk.sends(Op::Copy, &copy);
        }
        let mark = desk.mark();
        desk.sends(Op::Mark, &mark);
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert!(desk.is_empty());
        let copied: Vec<(u64, u64)> = desk
            .test
            .recorded()
            .into_iter()
            .map(|[to, from, ..]| (to, from))
            .collect();
        let (device, host) = (desk.device, desk.host);
        assert_eq!(copied, [(host, device), (device, host), (host, device)]);
        assert_eq!(desk.test.calls(), 4);
        let moved = desk.test.session.flow.counts.managed;
        let expected = |copies| Moved {
            bytes: copies * LEN,
            copies,
        };
        assert_eq!((moved.to_host, moved.to_device), (expected(2), expected(1)));
        assert_eq!(desk.serve(), Ok(Served::Nothing));
    }

    #[test]
    fn another_operation_ends_the_session() {
        for op in [Op::StreamDestroy as u16, Op::Copy as u16 | 0x8000] {
            let mut desk = Desk::new(&COPIES);
            let body = Object {
                object: desk.stream,
            };
            let room = desk.express.reserve(size_of::<Object>()).expect("room");
            desk.express.fill(room, 0, body.as_bytes());
            desk.express.publish(room, op, 0, 0);
            assert_eq!(desk.ends(), format!("opcode {op} in the express ring"));
            assert_eq!(desk.test.calls(), 0);
        }
    }

    #[test]
    fn memory_of_others_is_not_copied_and_ends_the_session() {
        let mut desk = Desk::new(&COPIES);
        let (device, host) = (desk.copy(Side::Device), desk.copy(Side::Host));
        let wrong = [
            Copy {
                to: desk.device + (1 << 30),
                ..device
            },
            Copy {
                from: 0x7000,
                ..device
            },
            Copy {
                from: desk.host + LEN,
                ..device
            },
            Copy {
                len: u64::MAX,
                ..host
            },
            Copy {
                to: desk.host + 1,
                ..host
            },
            Copy {
                from: desk.device + (1 << 30),
                ..host
            },
        ];
        for copy in wrong {
            desk.sends(Op::Copy, &copy);
            let refused = format!("managed memory was not copied: {CUDA_ERROR_INVALID_VALUE}");
            assert_eq!(desk.ends(), refused, "{copy:?}");
            let found = desk.test.session.inbox.express.peek().unwrap().unwrap();
            desk.test.session.inbox.express.consume(&found);
        }
        assert_eq!(desk.test.calls(), 0);
        assert_eq!(desk.test.session.flow.counts.managed, Default::default());
    }

    #[test]
    fn a_copy_without_a_side_and_a_mark_without_a_flag_end_the_session() {
        let mut desk = Desk::new(&COPIES);
        let copy = Copy {
            sides: 0xff,
            ..desk.copy(Side::Host)
        };
        desk.sends(Op::Copy, &copy);
        assert_eq!(desk.ends(), "copy side 255");
        drop(desk);
        let mut desk = Desk::new(&COPIES);
        let mark = Mark {
            slot: u32::MAX,
            ..desk.mark()
        };
        desk.sends(Op::Mark, &mark);
        assert!(desk.ends().contains("out of range"));
    }

    #[test]
    fn a_copy_that_the_driver_refuses_ends_the_session() {
        for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_ILLEGAL_ADDRESS] {
            let mut desk = Desk::new(&[("cuMemcpyDtoHAsync_v2", obeys as Function)]);
            desk.test.orders(status);
            let copy = desk.copy(Side::Host);
            desk.sends(Op::Copy, &copy);
            let why = format!("managed memory was not copied: {status}");
            assert_eq!(desk.ends(), why);
            assert_eq!(desk.test.session.flow.counts.managed, Default::default());
        }
    }

    #[test]
    fn copies_pass_a_full_command_ring() {
        let mut desk = Desk::new(&COPIES);
        let body = Object {
            object: desk.stream,
        };
        while put(&mut desk.commands, Op::StreamDestroy, &body).is_some() {}
        let (copy, mark) = (desk.copy(Side::Host), desk.mark());
        desk.sends(Op::Copy, &copy);
        desk.sends(Op::Mark, &mark);
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert!(desk.is_empty() && desk.test.session.inbox.consumer.has_message());
        assert_eq!(desk.test.calls(), 2);
    }

    #[test]
    fn copies_pass_a_stream_that_is_held() {
        let mut desk = Desk::new(&COPIES);
        let body = HostFunction {
            stream: desk.stream,
            slot: 4,
            value: 1,
        };
        desk.test
            .handle(Op::HostFunction, &body, &[])
            .expect("held");
        assert!(desk.test.session.inbox.held.any());
        desk.test.calls();
        let (copy, mark) = (desk.copy(Side::Host), desk.mark());
        desk.sends(Op::Copy, &copy);
        desk.sends(Op::Mark, &mark);
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert!(desk.is_empty() && desk.test.session.inbox.held.any());
        assert_eq!(desk.test.calls(), 2);
    }

    #[test]
    fn messages_wait_while_the_session_may_not_work_unless_it_has_work_in_flight() {
        let mut desk = Desk::new(&COPIES);
        let gpu = desk.test.shared.gpu.clone();
        let copy = desk.copy(Side::Host);
        desk.sends(Op::Copy, &copy);
        let hush = gpu.calm(desk.test.session.side).hush();
        for _ in 0..2 {
            assert_eq!(desk.serve(), Ok(Served::Full));
            assert!(!desk.is_empty());
        }
        assert_eq!(desk.test.calls(), 0);
        drop(hush);
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert_eq!(desk.test.calls(), 1);
        // Its work may wait for the page.
        let _hush = gpu.calm(desk.test.session.side).hush();
        desk.test
            .session
            .shared
            .at_work
            .store(true, Ordering::SeqCst);
        desk.sends(Op::Copy, &copy);
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert_eq!(desk.test.calls(), 1);
    }

    #[test]
    fn a_visit_ends_after_some_messages() {
        let mut desk = Desk::new(&COPIES);
        let mark = desk.mark();
        for _ in 0..BUDGET + 1 {
            desk.sends(Op::Mark, &mark);
        }
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert!(!desk.is_empty());
        assert_eq!(desk.serve(), Ok(Served::Some));
        assert!(desk.is_empty());
    }
}
