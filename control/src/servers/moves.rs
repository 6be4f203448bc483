//! Orders to move the device memory of clients to host memory, and back.

use super::Servers;
use crate::link::MoveMemory;
use mpsshim_model::suspension::{Placement, Unmoved};
use std::time::{Duration, Instant};

/// How long the copies may take, in addition to the time in which the client must be idle.
const COPY_PATIENCE: Duration = Duration::from_secs(600);

/// The moves that have been ordered.
#[derive(Default)]
pub(super) struct Moves {
    last: u64,
    running: Vec<Move>,
}

/// The move of one client's memory.
struct Move {
    number: u64,
    server: i32,
    client: i32,
    /// Whether to host memory.
    out: bool,
    /// Sessions of the client without an outcome.
    left: Vec<u64>,
    moved: Placement,
    /// Why the memory of a session is not moved.
    failed: Option<Unmoved>,
    until: Instant,
}

impl Moves {
    /// A session's memory has been moved, or has not.
    fn note(
        &mut self,
        server: i32,
        number: u64,
        session: u64,
        outcome: Result<Placement, Unmoved>,
    ) {
        let of_it = |one: &&mut Move| one.number == number && one.server == server;
        let Some(of_it) = self.running.iter_mut().find(of_it) else {
            return;
        };
        let Some(at) = of_it.left.iter().position(|left| *left == session) else {
            return;
        };
        of_it.left.swap_remove(at);
        match outcome {
            Ok(moved) => {
                of_it.moved.moved_out = of_it.moved.moved_out.saturating_add(moved.moved_out);
                of_it.moved.resident = of_it.moved.resident.saturating_add(moved.resident);
            }
            Err(why) => of_it.failed = Some(why),
        }
    }
}

impl Servers {
    /// Orders a server to move the device memory of a client to host memory (`out`) or back. Returns the number of the order.
    ///
    /// # Errors
    /// Why that is impossible, in words.
    pub fn move_memory(
        &mut self,
        server: i32,
        client: i32,
        out: bool,
        patience: Duration,
    ) -> Result<u64, String> {
        let (link, left) = self.sessions_of(server, client)?;
        let number = self.moves.last + 1;
        for session in &left {
            let order = MoveMemory {
                number,
                session: *session,
                out,
                patience_ms: patience.as_millis() as u64,
            };
            link.order_move(order)
                .map_err(|error| format!("Server {server}: {error}"))?;
        }
        self.moves.last = number;
        self.moves.running.push(Move {
            number,
            server,
            client,
            out,
            left,
            moved: Placement::default(),
            failed: None,
            until: Instant::now() + patience + COPY_PATIENCE,
        });
        Ok(number)
    }

    /// Takes up the reports on moves.
    pub(super) fn collect_moves(&mut self) {
        for server in &mut self.running {
            let pid = server.pid;
            for (number, session, outcome) in server.moves.drain(..) {
                self.moves.note(pid, number, session, outcome);
            }
        }
    }

    /// When an order is given up.
    pub fn move_deadline(&self, number: u64) -> Option<Instant> {
        let mut running = self.moves.running.iter();
        running
            .find(|one| one.number == number)
            .map(|one| one.until)
    }

    /// Whether an order has been carried out, or never will be.
    pub fn is_moved(&self, number: u64, now: Instant) -> bool {
        let mut running = self.moves.running.iter();
        let Some(of_it) = running.find(|one| one.number == number) else {
            return true;
        };
        let server = self.by_pid(of_it.server);
        let has_session = |session: &u64| server.is_some_and(|server| server.has_session(*session));
        !of_it.left.iter().any(has_session) || now >= of_it.until
    }

    /// The outcome of an order, in words. Returned only once.
    ///
    /// # Errors
    /// Why the memory is not where it was to be.
    pub fn moved(&mut self, number: u64) -> Result<String, String> {
        let running = &mut self.moves.running;
        let at = running.iter().position(|one| one.number == number);
        let of_it = running.swap_remove(at.ok_or("there is no such order")?);
        let verb = if of_it.out { "suspended" } else { "resumed" };
        let failed = match of_it.failed {
            None if !of_it.left.is_empty() => Some(Unmoved::Ended),
            failed => failed,
        };
        if let Some(why) = failed {
            return Err(format!(
                "Client {} of server {} is not {verb}: {why}",
                of_it.client, of_it.server
            ));
        }
        let Placement {
            moved_out,
            resident,
        } = of_it.moved;
        Ok(format!(
            "{moved_out} bytes in host memory, {resident} bytes on the devices"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_count_once_and_for_their_order_only() {
        let mut moves = Moves::default();
        moves.running.push(Move {
            number: 3,
            server: 7,
            client: 8,
            out: true,
            left: vec![1, 2],
            moved: Placement::default(),
            failed: None,
            until: Instant::now(),
        });
        let moved = Placement {
            moved_out: 5,
            resident: 1,
        };
        moves.note(7, 2, 1, Ok(moved));
        moves.note(6, 3, 1, Ok(moved));
        moves.note(7, 3, 9, Err(Unmoved::Busy));
        assert_eq!(moves.running[0].left, [1, 2]);
        moves.note(7, 3, 1, Ok(moved));
        moves.note(7, 3, 1, Ok(moved));
        assert_eq!(moves.running[0].moved, moved);
        moves.note(7, 3, 2, Err(Unmoved::Busy));
        assert!(moves.running[0].left.is_empty());
        assert_eq!(moves.running[0].failed, Some(Unmoved::Busy));
    }
}
