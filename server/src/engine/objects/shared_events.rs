//! Events shared by several sessions of one user: `cuIpcGetEventHandle`, `cuIpcOpenEventHandle`.
//!
//! The handle that programs exchange is a random number, which only the server can resolve. The driver's event lives as
//! long as any session has it open. As with the genuine driver, a handle can still be opened after every session has
//! closed the event: the new event then has the state of its last record.

pub mod session;

use crate::engine::base::driver::Driver;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::side::{self, Side};
use crate::engine::objects::events::Event;
use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// `CUipcEventHandle`.
pub type Token = [u64; 8];

/// A driver event that belongs to one record, or the event that the exporting session created.
#[derive(Clone, Copy, Debug)]
struct Made {
    raw: CUevent,
    device: Ordinal,
    /// The side of its context: an event can be recorded only in its own context, but waited for in any.
    side: Side,
}

/// Driver events that no record uses any more.
type Spare = Arc<Mutex<Vec<Made>>>;

/// Most spare events that are kept.
const MOST_SPARE: usize = 64;
/// Most events per user that no session has open but whose handles can still be opened. Allows for the number of events
/// that one program may create.
const MOST_LEFT: usize = 1024;

/// One record of a shared event. It has a driver event of its own, so that a wait for this record does not wait for
/// later ones.
#[derive(Debug)]
pub struct Record {
    state: Mutex<State>,
    /// Receives the driver event when the record is dropped; `None` if the driver event is the shared event itself.
    spare: Option<Spare>,
}

#[derive(Debug)]
enum State {
    /// The record is deferred. If it is never made, the preceding record applies.
    Pending(Option<Arc<Record>>),
    /// The driver has made the record.
    Made(Made),
    /// It was refused, or its session has ended: the preceding record applies.
    Failed(Option<Arc<Record>>),
}

impl Drop for Record {
    fn drop(&mut self) {
        if let (State::Made(made), Some(spare)) = (self.state.get_mut(), &self.spare) {
            spare.lock().push(*made);
        }
    }
}

/// The effective state of a record.
#[derive(Debug)]
pub enum Standing {
    /// There is no record.
    None,
    /// The driver has made the record, with this event.
    Made(CUevent),
    /// The record is deferred.
    Pending,
}

impl Record {
    fn new(state: State, spare: Option<Spare>) -> Arc<Record> {
        let state = Mutex::new(state);
        Arc::new(Record { state, spare })
    }

    /// Returns the record that applies in place of a failed one.
    fn effective(mut record: Arc<Record>) -> Option<Arc<Record>> {
        loop {
            let before = match &*record.state.lock() {
                State::Failed(before) => before.clone(),
                State::Pending(_) | State::Made(_) => break,
            };
            record = before?;
        }
        Some(record)
    }

    /// Whether the device may not have reached the record yet.
    fn is_ahead(&self, driver: &Driver) -> bool {
        match &*self.state.lock() {
            State::Made(made) => driver.event_query(made.raw) == Err(CUDA_ERROR_NOT_READY),
            State::Pending(_) => true,
            State::Failed(_) => false,
        }
    }

    /// Whether its driver event belongs to a context of this side.
    fn is_of(&self, side: Side) -> bool {
        matches!(&*self.state.lock(), State::Made(made) if made.side == side)
    }

    /// Returns the state of a record, or of the record before it that applies if it failed.
    pub fn standing(record: &Arc<Record>) -> Standing {
        match Record::effective(record.clone()) {
            None => Standing::None,
            Some(record) => match &*record.state.lock() {
                State::Made(made) => Standing::Made(made.raw),
                // It may have failed just now; the next query then returns the final state.
                State::Pending(_) | State::Failed(_) => Standing::Pending,
            },
        }
    }
}

/// A deferred record, held by the session that is to make it. If the ticket is dropped first, the record fails.
#[derive(Debug)]
pub struct Ticket(Arc<Record>);

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if let State::Pending(before) = &mut *state {
            let before = before.take().and_then(Record::effective);
            *state = State::Failed(before);
        }
    }
}

/// The part of a shared event that belongs to a deferred message, as of the message's arrival.
#[derive(Debug)]
pub enum Taken {
    /// The message records the event.
    Record(Ticket),
    /// The message waits for this record.
    Wait(Option<Arc<Record>>),
}

/// An event shared by several sessions.
#[derive(Debug)]
pub struct SharedEvent {
    /// The exporting session's event, which graphs record and wait for. Each record made in its context records it,
    /// too.
    made: Made,
    /// The user whose sessions may open it.
    uid: u32,
    token: Token,
    /// The latest record by any session, in the order in which the server took the messages out of the rings.
    latest: Mutex<Option<Arc<Record>>>,
    /// Whether graphs may record it.
    by_graphs: AtomicBool,
    spare: Spare,
}

impl SharedEvent {
    /// Whether any session has recorded it.
    pub fn is_recorded(&self) -> bool {
        self.is_by_graphs() || self.latest.lock().is_some()
    }

    /// Returns the latest record.
    pub fn latest(&self) -> Option<Arc<Record>> {
        self.latest.lock().clone()
    }

    /// Notes that graphs may record it from now on.
    pub fn note_by_graphs(&self) {
        self.by_graphs.store(true, Ordering::Release);
    }

    /// Whether graphs may record it: then [`SharedEvent::raw`] must be considered as well.
    pub fn is_by_graphs(&self) -> bool {
        self.by_graphs.load(Ordering::Acquire)
    }

    /// The token in its handle.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The driver's event that graphs use.
    pub fn raw(&self) -> CUevent {
        self.made.raw
    }

    /// Adds a deferred record, which is the latest from now on.
    pub fn defer_record(&self) -> Ticket {
        let mut latest = self.latest.lock();
        let before = latest.take();
        let record = Record::new(State::Pending(before), Some(self.spare.clone()));
        *latest = Some(record.clone());
        Ticket(record)
    }

    /// Records the event on a driver stream of the current context, which is on `device`. `ticket` is set if the record
    /// was deferred.
    ///
    /// # Errors
    /// The driver's status; a deferred record then fails.
    pub fn record(
        &self,
        driver: &Driver,
        (device, stream): (Ordinal, CUstream),
        ticket: Option<Ticket>,
    ) -> Result<(), CUresult> {
        let made = self.take_spare(driver, device)?;
        if let Err(status) = driver.event_record(made.raw, stream, 0) {
            self.spare.lock().push(made);
            return Err(status);
        }
        let before = match ticket {
            Some(ticket) => std::mem::replace(&mut *ticket.0.state.lock(), State::Made(made)),
            None => {
                let record = Record::new(State::Made(made), Some(self.spare.clone()));
                State::Failed(self.latest.lock().replace(record))
            }
        };
        // Dropped outside the locks, since it may be the last reference to other records.
        drop(before);
        if (made.device, made.side) == (self.made.device, self.made.side) {
            driver.event_record(self.made.raw, stream, 0)?;
        }
        Ok(())
    }

    fn take_spare(&self, driver: &Driver, device: Ordinal) -> Result<Made, CUresult> {
        let side = side::entered();
        let (found, surplus) = {
            let mut spare = self.spare.lock();
            let fits = |made: &Made| made.device == device && made.side == side;
            let found = spare.iter().position(fits).map(|at| spare.swap_remove(at));
            let kept = spare.len().min(MOST_SPARE);
            (found, spare.split_off(kept))
        };
        for made in surplus {
            let _ = driver.event_destroy(made.raw);
        }
        if let Some(made) = found {
            return Ok(made);
        }
        let mut raw = CUevent::NULL;
        driver.event_create(&mut raw, CU_EVENT_DISABLE_TIMING)?;
        Ok(Made { raw, device, side })
    }

    fn is_of(&self, side: Side) -> bool {
        let latest = self.latest();
        self.made.side == side
            || latest.is_some_and(|record| match &*record.state.lock() {
                State::Made(made) => made.side == side,
                State::Pending(_) | State::Failed(_) => true,
            })
    }
}

/// A shared event that no session has open any more.
#[derive(Debug)]
struct Left {
    uid: u32,
    device: Ordinal,
    /// Its latest record, if the device had not reached it when the last session closed the event.
    record: Option<Arc<Record>>,
}

/// All shared events that can be opened.
#[derive(Debug, Default)]
pub struct SharedEvents {
    known: Mutex<Known>,
    spare: Spare,
    torn: Mutex<HashSet<Token>>,
}

#[derive(Debug, Default)]
struct Known {
    events: HashMap<Token, Weak<SharedEvent>>,
    left: HashMap<Token, Left>,
    /// The tokens of `left`, oldest first.
    order: VecDeque<(u32, Token)>,
}

impl Known {
    /// Keeps an event that no session has open any more, and discards the user's oldest one beyond [`MOST_LEFT`].
    fn leave(&mut self, token: Token, left: Left) {
        let uid = left.uid;
        self.left.insert(token, left);
        self.order.push_back((uid, token));
        let of_user = |(of, _): &&(u32, Token)| *of == uid;
        if self.order.iter().filter(of_user).count() > MOST_LEFT
            && let Some(oldest) = self.order.iter().position(|(of, _)| *of == uid)
            && let Some((_, token)) = self.order.remove(oldest)
        {
            self.left.remove(&token);
        }
    }
}

impl SharedEvents {
    /// Returns the token of a session's event and allows other sessions to open it.
    ///
    /// # Errors
    /// `CUDA_ERROR_OPERATING_SYSTEM` if no random numbers are available, `CUDA_ERROR_CAPTURED_EVENT` if the event's
    /// record is part of a capture.
    pub fn export(&self, event: &mut Event, uid: u32) -> Result<Token, CUresult> {
        if let Some(shared) = &event.shared {
            return Ok(shared.token);
        }
        if event.captured {
            return Err(CUDA_ERROR_CAPTURED_EVENT);
        }
        let token = random()?;
        let made = Made {
            raw: event.raw,
            device: event.device,
            side: side::entered(),
        };
        let first = event.recorded.then(|| Record::new(State::Made(made), None));
        let shared = Arc::new(SharedEvent {
            made,
            uid,
            token,
            latest: Mutex::new(first),
            by_graphs: AtomicBool::new(event.time.is_by_graphs()),
            spare: self.spare.clone(),
        });
        let mut known = self.known.lock();
        known.events.insert(token, Arc::downgrade(&shared));
        event.shared = Some(shared);
        Ok(token)
    }

    /// Opens the event with this token for a session of the same user. `create` creates a driver event on a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_MAP_FAILED` for an invalid token or one of another user, or the driver's status.
    pub fn import(
        &self,
        token: &Token,
        uid: u32,
        create: impl FnOnce(Ordinal) -> Result<CUevent, CUresult>,
    ) -> Result<Event, CUresult> {
        let mut known = self.known.lock();
        let shared = match known.events.get(token).and_then(Weak::upgrade) {
            Some(shared) => shared,
            None => {
                let left = known.left.get(token).ok_or(CUDA_ERROR_MAP_FAILED)?;
                if left.uid != uid {
                    return Err(CUDA_ERROR_MAP_FAILED);
                }
                let made = Made {
                    raw: create(left.device)?,
                    device: left.device,
                    side: side::entered(),
                };
                let shared = Arc::new(SharedEvent {
                    made,
                    uid,
                    token: *token,
                    latest: Mutex::new(left.record.clone()),
                    by_graphs: AtomicBool::new(false),
                    spare: self.spare.clone(),
                });
                known.left.remove(token);
                known.order.retain(|(_, left)| left != token);
                known.events.insert(*token, Arc::downgrade(&shared));
                shared
            }
        };
        if shared.uid != uid {
            return Err(CUDA_ERROR_MAP_FAILED);
        }
        Ok(Event {
            shared: Some(shared.clone()),
            ..Event::opened(shared.made.raw, shared.made.device)
        })
    }

    /// Shares an event of the current context under the token that it had in an earlier server. If another session shares it
    /// already, the event becomes that one; returns the driver's event that it had.
    ///
    /// # Errors
    /// `CUDA_ERROR_MAP_FAILED` for a token of another user.
    pub fn adopt(
        &self,
        token: &Token,
        uid: u32,
        event: &mut Event,
    ) -> Result<Option<CUevent>, CUresult> {
        let mut known = self.known.lock();
        if let Some(shared) = known.events.get(token).and_then(Weak::upgrade) {
            if shared.uid != uid {
                return Err(CUDA_ERROR_MAP_FAILED);
            }
            let before = std::mem::replace(&mut event.raw, shared.made.raw);
            event.device = shared.made.device;
            event.shared = Some(shared);
            return Ok(Some(before));
        }
        let made = Made {
            raw: event.raw,
            device: event.device,
            side: side::entered(),
        };
        let shared = Arc::new(SharedEvent {
            made,
            uid,
            token: *token,
            latest: Mutex::new(None),
            by_graphs: AtomicBool::new(false),
            spare: self.spare.clone(),
        });
        known.events.insert(*token, Arc::downgrade(&shared));
        event.shared = Some(shared);
        Ok(None)
    }

    /// Notes events that a session may have recorded which is lost with work in flight, while the other sessions are restored.
    pub fn note_torn(&self, tokens: impl IntoIterator<Item = Token>) {
        self.torn.lock().extend(tokens);
    }

    /// Whether an event was passed to [`SharedEvents::note_torn`].
    pub fn is_torn(&self, token: &Token) -> bool {
        self.torn.lock().contains(token)
    }

    /// Ends the restoring of sessions: clears the list of [`SharedEvents::note_torn`].
    pub fn end_restoring(&self) {
        self.torn.lock().clear();
    }

    /// Whether sessions share events of a side, or may wait for records made there.
    pub fn any_of(&self, side: Side) -> bool {
        // Under the lock, as in `end`, so that the upgraded reference is not mistaken for another holder there.
        let known = self.known.lock();
        let mut alive = known.events.values().filter_map(Weak::upgrade);
        alive.any(|event| event.is_of(side))
    }

    /// Destroys the spare events of a side whose context is about to be destroyed.
    pub fn clear_spare(&self, driver: &Driver, side: Side) {
        // Nothing is in flight on the side, so its records are complete.
        let over: Vec<_> = {
            let mut known = self.known.lock();
            let left = known.left.values_mut();
            left.filter_map(|left| left.record.take_if(|record| record.is_of(side)))
                .collect()
        };
        drop(over);
        let gone: Vec<Made> = {
            let mut spare = self.spare.lock();
            spare.extract_if(.., |made| made.side == side).collect()
        };
        for made in gone {
            let _ = driver.event_destroy(made.raw);
        }
    }

    /// Closes a session's event; the last session to close it destroys it.
    ///
    /// # Errors
    /// The driver's status.
    pub fn end(&self, driver: &Driver, event: Event) -> Result<(), CUresult> {
        if let Some(shared) = event.shared {
            // Under the lock, so that no session can open the event while it is being destroyed.
            let mut known = self.known.lock();
            let Some(last) = Arc::into_inner(shared) else {
                return Ok(());
            };
            known.events.remove(&last.token);
            let record = last.latest.into_inner().and_then(Record::effective);
            let record = record.filter(|record| record.is_ahead(driver));
            // The pending record uses the event itself, which is then destroyed with the record.
            let is_itself = record.as_ref().is_some_and(|record| record.spare.is_none());
            let record = match is_itself {
                true => Some(Record::new(
                    State::Made(last.made),
                    Some(self.spare.clone()),
                )),
                false => record,
            };
            let left = Left {
                uid: last.uid,
                device: last.made.device,
                record,
            };
            known.leave(last.token, left);
            drop(known);
            self.settle(driver);
            if is_itself {
                return Ok(());
            }
        }
        driver.event_destroy(event.raw)
    }

    /// Destroys the spare events if no event is shared any more. Must be called again after a session has ended, which
    /// may have held records.
    pub fn settle(&self, driver: &Driver) {
        let shared = |event: &Weak<SharedEvent>| event.strong_count() > 0;
        let over: Vec<_> = {
            let mut known = self.known.lock();
            if known.events.values().any(shared) {
                return;
            }
            let left = known.left.values_mut();
            left.filter_map(|left| left.record.take_if(|record| !record.is_ahead(driver)))
                .collect()
        };
        drop(over);
        let spare = std::mem::take(&mut *self.spare.lock());
        for made in spare {
            let _ = driver.event_destroy(made.raw);
        }
    }
}

fn random() -> Result<Token, CUresult> {
    let mut token = Token::default();
    // SAFETY: as many bytes as the array has.
    let got = unsafe { libc::getrandom(token.as_mut_ptr().cast(), size_of::<Token>(), 0) };
    if got == size_of::<Token>() as isize {
        Ok(token)
    } else {
        Err(CUDA_ERROR_OPERATING_SYSTEM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::objects::times::Time;

    fn event() -> Event {
        Event {
            raw: CUevent(7),
            device: Ordinal::of_test(0),
            flags: 0,
            recorded: true,
            time: Time::default(),
            captured: false,
            shared: None,
        }
    }

    fn standing(record: &Option<Arc<Record>>) -> Option<Standing> {
        record.as_ref().map(Record::standing)
    }

    #[test]
    fn a_deferred_record_is_the_last_one_until_it_fails() {
        let events = SharedEvents::default();
        let mut event = event();
        events.export(&mut event, 1000).unwrap();
        let shared = event.shared.clone().unwrap();
        let (first, second) = (shared.defer_record(), shared.defer_record());
        let waits = shared.latest();
        assert!(matches!(standing(&waits), Some(Standing::Pending)));
        // Whichever record fails first, the preceding one applies.
        drop(second);
        assert!(matches!(standing(&waits), Some(Standing::Pending)));
        drop(first);
        assert!(matches!(standing(&waits), Some(Standing::Made(raw)) if raw == CUevent(7)));
        assert!(matches!(
            standing(&shared.latest()),
            Some(Standing::Made(_))
        ));
    }

    #[test]
    fn a_record_that_fails_first_leaves_none() {
        let events = SharedEvents::default();
        let mut event = Event {
            recorded: false,
            ..event()
        };
        events.export(&mut event, 1000).unwrap();
        let shared = event.shared.clone().unwrap();
        assert!(!shared.is_recorded());
        drop(shared.defer_record());
        assert!(matches!(standing(&shared.latest()), Some(Standing::None)));
    }

    #[test]
    fn only_the_same_user_opens_what_exists() {
        let events = SharedEvents::default();
        let mut first = event();
        let token = events.export(&mut first, 1000).unwrap();
        assert_eq!(events.export(&mut first, 1000), Ok(token));
        let none = |_| Err(CUDA_ERROR_OUT_OF_MEMORY);
        let opened = events.import(&token, 1000, none).unwrap();
        assert!(opened.raw == first.raw && opened.shared.unwrap().is_recorded());
        let refused = |token: &Token, uid| events.import(token, uid, none).unwrap_err();
        assert_eq!(refused(&token, 0), CUDA_ERROR_MAP_FAILED);
        assert_eq!(refused(&[0; 8], 1000), CUDA_ERROR_MAP_FAILED);
        let mut second = event();
        assert_ne!(events.export(&mut second, 1000), Ok(token));
    }

    #[test]
    fn sessions_of_the_next_server_share_one_event_again() {
        let (before, after) = (SharedEvents::default(), SharedEvents::default());
        let mut first = event();
        let token = before.export(&mut first, 1000).unwrap();
        let mut again = event();
        assert_eq!(after.adopt(&token, 1000, &mut again), Ok(None));
        let own = Event {
            raw: CUevent(8),
            ..event()
        };
        let mut other = Event { ..own };
        assert_eq!(
            after.adopt(&token, 0, &mut other),
            Err(CUDA_ERROR_MAP_FAILED)
        );
        assert!(other.shared.is_none());
        assert_eq!(after.adopt(&token, 1000, &mut other), Ok(Some(CUevent(8))));
        assert!(other.raw == again.raw && !other.is_recorded());
        drop(again.shared.unwrap().defer_record());
        let none = |_| Err(CUDA_ERROR_OUT_OF_MEMORY);
        assert!(after.import(&token, 1000, none).is_ok());
        after.note_torn([token]);
        assert!(after.is_torn(&token) && !after.is_torn(&[0; 8]));
        after.end_restoring();
        assert!(!after.is_torn(&token));
    }

    #[test]
    fn handles_of_what_is_gone_can_be_opened_but_for_the_oldest() {
        let (mut known, device) = (Known::default(), Ordinal::of_test(0));
        let token = |number: usize| Token::from([number as u64; 8]);
        let left = |uid| Left {
            uid,
            device,
            record: None,
        };
        known.leave(token(0), left(7));
        for number in 1..=MOST_LEFT + 1 {
            known.leave(token(number), left(1000));
        }
        assert!(known.left.contains_key(&token(0)), "another user's");
        assert!(!known.left.contains_key(&token(1)) && known.left.contains_key(&token(2)));
        assert_eq!(
            (known.left.len(), known.order.len()),
            (MOST_LEFT + 1, MOST_LEFT + 1)
        );
    }
}
