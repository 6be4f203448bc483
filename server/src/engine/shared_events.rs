//! Events that several sessions of one user share: `cuIpcGetEventHandle`, `cuIpcOpenEventHandle`.
//!
//! The handle that programs pass on is a number that was drawn at random; what it stands for is known here only. The
//! driver's event lives as long as any session has it.

use super::Shared;
use super::devices::Ordinal;
use super::driver::Driver;
use super::session::Event;
use super::side::{self, Side};
use super::times::Time;
use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// `CUipcEventHandle`.
pub type Token = [u64; 8];

/// An event of several sessions.
#[derive(Debug)]
pub struct SharedEvent {
    raw: CUevent,
    device: Ordinal,
    /// Where it was made.
    side: Side,
    /// Whose sessions may open it.
    uid: u32,
    token: Token,
    recorded: AtomicBool,
}

impl SharedEvent {
    /// Whether some session has recorded it.
    pub fn is_recorded(&self) -> bool {
        self.recorded.load(Ordering::Acquire)
    }
    /// A session has recorded it.
    pub fn note_recorded(&self) {
        self.recorded.store(true, Ordering::Release);
    }
}

/// The events that can be opened.
#[derive(Debug, Default)]
pub struct SharedEvents {
    known: Mutex<HashMap<Token, Weak<SharedEvent>>>,
}

impl SharedEvents {
    /// The token of a session's event, which others may open from now on.
    ///
    /// # Errors
    /// `CUDA_ERROR_OPERATING_SYSTEM` without random numbers, `CUDA_ERROR_CAPTURED_EVENT` for one whose record is part of a
    /// capture.
    pub fn export(&self, event: &mut Event, uid: u32) -> Result<Token, CUresult> {
        if let Some(shared) = &event.shared {
            return Ok(shared.token);
        }
        if event.captured {
            return Err(CUDA_ERROR_CAPTURED_EVENT);
        }
        let token = random()?;
        let shared = Arc::new(SharedEvent {
            raw: event.raw,
            device: event.device,
            side: side::entered(),
            uid,
            token,
            recorded: AtomicBool::new(event.recorded),
        });
        self.known.lock().insert(token, Arc::downgrade(&shared));
        event.shared = Some(shared);
        Ok(token)
    }

    /// The event of a token, for a session of the same user.
    ///
    /// # Errors
    /// `CUDA_ERROR_MAP_FAILED`, as for a handle that is none.
    pub fn import(&self, token: &Token, uid: u32) -> Result<Event, CUresult> {
        let known = self.known.lock();
        let shared = known.get(token).and_then(Weak::upgrade);
        match shared.filter(|shared| shared.uid == uid) {
            Some(shared) => Ok(Event {
                raw: shared.raw,
                device: shared.device,
                flags: 0,
                recorded: false,
                time: Time::default(),
                captured: false,
                shared: Some(shared),
            }),
            None => Err(CUDA_ERROR_MAP_FAILED),
        }
    }

    /// Whether sessions share events of a side.
    pub fn any_of(&self, side: Side) -> bool {
        let known = self.known.lock();
        let mut alive = known.values().filter_map(Weak::upgrade);
        alive.any(|event| event.side == side)
    }

    /// A session gives its event up; the last one ends it.
    ///
    /// # Errors
    /// The driver's.
    pub fn end(&self, driver: &Driver, event: Event) -> Result<(), CUresult> {
        if let Some(shared) = event.shared {
            // Under the lock, so that nobody opens what is being ended.
            let mut known = self.known.lock();
            let Some(last) = Arc::into_inner(shared) else {
                return Ok(());
            };
            known.remove(&last.token);
        }
        driver.event_destroy(event.raw)
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

impl Shared {
    /// Ends a session's event; its device's context is current.
    ///
    /// # Errors
    /// The driver's.
    pub fn end_event(&self, event: Event) -> Result<(), CUresult> {
        self.shared_events.end(&self.driver, event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn only_the_same_user_opens_what_exists() {
        let events = SharedEvents::default();
        let mut first = event();
        let token = events.export(&mut first, 1000).unwrap();
        assert_eq!(events.export(&mut first, 1000), Ok(token));
        let opened = events.import(&token, 1000).unwrap();
        assert!(opened.raw == first.raw && opened.shared.unwrap().is_recorded());
        let refused = |token: &Token, uid| events.import(token, uid).unwrap_err();
        assert_eq!(refused(&token, 0), CUDA_ERROR_MAP_FAILED);
        assert_eq!(refused(&[0; 8], 1000), CUDA_ERROR_MAP_FAILED);
        drop(first);
        assert_eq!(refused(&token, 1000), CUDA_ERROR_MAP_FAILED);
        let mut second = event();
        assert_ne!(events.export(&mut second, 1000), Ok(token));
    }
}
