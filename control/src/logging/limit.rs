//! Limits the number of log lines per user. Otherwise any user who can connect to the daemon could fill its disk.
//!
//! Lines that a thread logs while it holds a [`Guard`] count against the guard's author. Lines of root are never
//! suppressed, nor, outside of servers, lines of the user running this process and lines without an author.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::Level;

/// Burst allowance: when a thousand clients start together, no line is suppressed.
const BURST: u32 = 1000;
/// Interval after which one more line is allowed: 20 lines a second, at most 10 KiB.
const PER_LINE: Duration = Duration::from_millis(50);
/// Longest text of such a line, bytes.
const LONGEST: usize = 512;
/// How long lines are suppressed before the log says how many.
const TELL_AFTER: Duration = Duration::from_secs(1);
/// Maximum number of authors with a separate allowance; all others share one.
const MOST: usize = 1024;

/// The originator of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Author {
    /// A process of this user.
    User(u32),
    /// All writers to the pipe `log`.
    LogPipe,
    /// Users without a separate allowance, and unknown users.
    Others,
}

impl fmt::Display for Author {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Author::User(uid) => write!(f, "of user {uid}"),
            Author::LogPipe => f.write_str("of the log pipe"),
            Author::Others => f.write_str("of other users"),
        }
    }
}

thread_local! {
    static CURRENT: Cell<Option<Author>> = const { Cell::new(None) };
}

static LIMITER: Mutex<Limiter> = Mutex::new(Limiter {
    authors: BTreeMap::new(),
});

/// While it exists, the lines of this thread count against its author.
pub struct Guard {
    before: Option<Author>,
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

/// Whether this process is a server: then its own user is limited like any other, and so are warnings without an
/// author.
static SERVES: AtomicBool = AtomicBool::new(false);

/// Marks this process as a server: its user is a client's user, not the owner of the log.
pub fn serve_clients() {
    SERVES.store(true, Ordering::Relaxed);
}

/// Counts the lines of this thread against this author, until the guard is dropped.
pub fn caused_by(author: Author) -> Guard {
    let own = || {
        !SERVES.load(Ordering::Relaxed) && author == Author::User(nix::unistd::geteuid().as_raw())
    };
    let counts = author != Author::User(0) && !own();
    Guard {
        before: CURRENT.replace(counts.then_some(author)),
        of_this_thread: PhantomData,
    }
}

/// Counts the lines of this thread against this user, until the guard is dropped.
pub fn caused_by_user(uid: u32) -> Guard {
    caused_by(Author::User(uid))
}

/// Whether a line of this thread's may be written now.
pub(super) fn admits(level: Level) -> bool {
    let anybody = level == Level::WARN && SERVES.load(Ordering::Relaxed);
    let author = CURRENT.get().or(anybody.then_some(Author::Others));
    author.is_none_or(|author| {
        let mut limiter = LIMITER.lock().unwrap_or_else(PoisonError::into_inner);
        limiter.admits(author, Instant::now())
    })
}

/// Cuts a line's text to the length that this thread may write.
pub(super) fn shortened(mut text: String) -> String {
    if CURRENT.get().is_some() && text.len() > LONGEST {
        let all = text.len();
        let mut end = LONGEST;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text += &format!("... ({} bytes more)", all - end);
    }
    text
}

/// When [`tell`] has something to say.
pub fn deadline() -> Option<Instant> {
    let limiter = LIMITER.lock().unwrap_or_else(PoisonError::into_inner);
    limiter.deadline()
}

/// Logs how many lines were suppressed lately, if any.
pub fn tell(now: Instant) {
    let mut limiter = LIMITER.lock().unwrap_or_else(PoisonError::into_inner);
    let due = limiter.due(now);
    drop(limiter);
    for (author, count) in due {
        tracing::info!("{count} lines {author} suppressed");
    }
}

#[derive(Default)]
struct Limiter {
    authors: BTreeMap<Author, Account>,
}

struct Account {
    /// When the full burst allowance is available again.
    full_at: Instant,
    /// Suppressed lines that have not been reported, and when to report them.
    suppressed: u64,
    tell_at: Option<Instant>,
}

impl Limiter {
    fn admits(&mut self, mut author: Author, now: Instant) -> bool {
        if self.authors.len() >= MOST && !self.authors.contains_key(&author) {
            self.authors
                .retain(|_, account| account.full_at > now || account.suppressed > 0);
            if self.authors.len() >= MOST {
                author = Author::Others;
            }
        }
        let account = self.authors.entry(author).or_insert(Account {
            full_at: now,
            suppressed: 0,
            tell_at: None,
        });
        let full_at = account.full_at.max(now) + PER_LINE;
        if full_at - now > PER_LINE * BURST {
            account.suppressed += 1;
            account.tell_at.get_or_insert(now + TELL_AFTER);
            return false;
        }
        account.full_at = full_at;
        true
    }

    fn deadline(&self) -> Option<Instant> {
        let tell_at = |account: &Account| account.tell_at;
        self.authors.values().filter_map(tell_at).min()
    }

    fn due(&mut self, now: Instant) -> Vec<(Author, u64)> {
        let told = |(author, account): (&Author, &mut Account)| {
            account.tell_at.take_if(|at| *at <= now)?;
            Some((*author, std::mem::take(&mut account.suppressed)))
        };
        self.authors.iter_mut().filter_map(told).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_so_many_a_second() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        let mut written = |author, count: u32, at| {
            let lines = (0..count).filter(|_| limiter.admits(author, at));
            lines.count() as u32
        };
        let user = Author::User(7);
        assert_eq!(written(user, 5000, start), BURST);
        assert_eq!(written(Author::User(8), 5, start), 5);
        assert_eq!(written(Author::LogPipe, 5000, start), BURST);
        let second = start + Duration::from_secs(1);
        assert_eq!(written(user, 5000, second), 20);
        assert_eq!(written(user, 5000, second), 0);
        let later = start + Duration::from_secs(3600);
        assert_eq!(written(user, 5000, later), BURST);
    }

    #[test]
    fn what_was_suppressed_is_told_once_a_second() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        assert_eq!(limiter.deadline(), None);
        for _ in 0..BURST + 3 {
            limiter.admits(Author::User(7), start);
        }
        let at = start + TELL_AFTER;
        assert_eq!(limiter.deadline(), Some(at));
        assert_eq!(limiter.due(start), []);
        assert_eq!(limiter.due(at), [(Author::User(7), 3)]);
        assert_eq!((limiter.due(at), limiter.deadline()), (Vec::new(), None));
    }

    #[test]
    fn there_are_only_so_many_accounts() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        let lines = (0..3 * MOST as u32).filter(|uid| limiter.admits(Author::User(*uid), start));
        assert_eq!(lines.count(), MOST + BURST as usize);
        assert_eq!(limiter.authors.len(), MOST + 1);
        // The others have been quiet for long enough to be as new.
        assert!(limiter.admits(Author::User(1 << 20), start + 2 * BURST * PER_LINE));
        assert!(limiter.authors.len() <= 2);
    }

    #[test]
    fn lines_of_strangers_are_shortened() {
        let long = "\u{e9}".repeat(1000);
        assert_eq!(shortened(long.clone()), long);
        let _guard = caused_by(Author::LogPipe);
        let short = shortened(long.clone());
        assert!(short.ends_with("... (1488 bytes more)"), "{short}");
        assert_eq!(short.find('.'), Some(512));
        let own = caused_by_user(nix::unistd::geteuid().as_raw());
        assert_eq!(shortened(long.clone()), long);
        drop(own);
        assert_ne!(shortened(long.clone()), long);
    }
}
