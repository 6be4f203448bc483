//! What must hold while anything is sent: nobody panics, nothing hangs, a bystander computes as ever, limits hold, and
//! everything comes back.

use anyhow::{anyhow, ensure};
use mpsshim_control::link::MoveMemory;
use mpsshim_model::client::EngineEvent;
use mpsshim_model::limits::Limits;
use mpsshim_tests::in_process::{Counts, InProcess, open_descriptors, resident_bytes, threads};
use mpsshim_tests::peer::{Peer, Worker};
use std::collections::HashSet;
use std::panic;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the engine may have of a device besides what clients have: modules, the spare of a bystander.
const SLACK: u64 = 16 << 20;
/// A round of the bystander that is worth a line.
const LONG_ROUND: Duration = Duration::from_millis(500);
/// How much the process may grow in a run, bytes: freed memory is not given back to the system at once.
const GROWTH: u64 = 1 << 30;

static SEED: AtomicU64 = AtomicU64::new(0);
static CASE: AtomicU64 = AtomicU64::new(0);
static STEP: AtomicU64 = AtomicU64::new(0);
static OPCODE: AtomicU64 = AtomicU64::new(0);
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Where the run is, for whoever reports a failure.
pub struct Progress;

impl Progress {
    /// A case begins.
    pub fn begin(seed: u64, case: u64) {
        SEED.store(seed, Ordering::Relaxed);
        CASE.store(case, Ordering::Relaxed);
        STEP.store(0, Ordering::Relaxed);
    }
    /// A step of it.
    pub fn step(step: u64) {
        STEP.store(step, Ordering::Relaxed);
    }
    /// What is sent.
    pub fn message(opcode: u16) {
        OPCODE.store(opcode.into(), Ordering::Relaxed);
    }
    fn text() -> String {
        let now = |word: &AtomicU64| word.load(Ordering::Relaxed);
        format!(
            "case {} at step {}, opcode {}; to see it again: --seed {} --from {}",
            now(&CASE),
            now(&STEP),
            now(&OPCODE),
            now(&SEED),
            now(&CASE)
        )
    }
}

/// Says where the run was when a thread panics or the process crashes.
pub fn watch_for_crashes() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICKED.store(true, Ordering::SeqCst);
        usual(info);
        eprintln!("fuzz_engine: a panic in {}", Progress::text());
    }));
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGABRT, libc::SIGILL] {
        // SAFETY: the handler only uses what is allowed in one.
        unsafe { libc::signal(signal, crashed as *const () as libc::sighandler_t) };
    }
}

/// Writes a line without allocating, then lets the signal do what it does.
extern "C" fn crashed(signal: libc::c_int) {
    let mut line = [0u8; 160];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        for byte in bytes {
            if at < line.len() {
                line[at] = *byte;
                at += 1;
            }
        }
    };
    let mut number = |name: &[u8], value: u64| {
        put(name);
        let mut digits = [0u8; 20];
        let mut first = digits.len();
        let mut left = value;
        while first == digits.len() || left > 0 {
            first -= 1;
            digits[first] = b'0' + (left % 10) as u8;
            left /= 10;
        }
        put(&digits[first..]);
    };
    number(b"fuzz_engine: signal ", signal as u64);
    number(b" in case ", CASE.load(Ordering::Relaxed));
    number(b" at step ", STEP.load(Ordering::Relaxed));
    number(b", opcode ", OPCODE.load(Ordering::Relaxed));
    number(b"; to see it again: --seed ", SEED.load(Ordering::Relaxed));
    number(b" --from ", CASE.load(Ordering::Relaxed));
    put(b"\n");
    // SAFETY: allowed in a handler.
    unsafe {
        libc::write(2, line.as_ptr().cast(), at);
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// A proper client that computes all the time.
struct Bystander {
    thread: Option<JoinHandle<Result<(), String>>>,
    /// Held during a round.
    turn: Arc<Mutex<()>>,
    stop: Arc<AtomicBool>,
    /// Nanoseconds.
    longest: Arc<AtomicU64>,
}

impl Bystander {
    fn start(peer: Peer) -> anyhow::Result<Bystander> {
        let mut worker = Worker::with(peer)?;
        // What is made once is made before anything is counted.
        worker.round()?;
        let turn = Arc::new(Mutex::new(()));
        let stop = Arc::new(AtomicBool::new(false));
        let longest = Arc::new(AtomicU64::new(0));
        let shared = (turn.clone(), stop.clone(), longest.clone());
        let thread = std::thread::Builder::new()
            .name("bystander".into())
            .spawn(move || {
                let (turn, stop, longest) = shared;
                while !stop.load(Ordering::SeqCst) {
                    let guard = turn.lock().unwrap_or_else(PoisonError::into_inner);
                    let (began, place) = (Instant::now(), Progress::text());
                    worker.round().map_err(|status| status.to_string())?;
                    drop(guard);
                    let took = began.elapsed();
                    let before = longest.fetch_max(took.as_nanos() as u64, Ordering::Relaxed);
                    if took > LONG_ROUND && took.as_nanos() > u128::from(before) {
                        eprintln!(
                            "fuzz_engine: a round of the bystander took {took:?}; it began in {place}"
                        );
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(())
            })?;
        Ok(Bystander {
            thread: Some(thread),
            turn,
            stop,
            longest,
        })
    }

    /// Its error, if it has ended.
    fn error(&mut self) -> Option<String> {
        let ended = self.thread.as_ref().is_some_and(JoinHandle::is_finished);
        let thread = self.thread.take_if(|_| ended)?;
        match thread.join() {
            Ok(Ok(())) => None,
            Ok(Err(status)) => Some(status),
            Err(_) => Some("a panic".into()),
        }
    }
}

/// What the process has open.
fn descriptors() -> Vec<String> {
    let all = std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten();
    all.filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.display().to_string())
        .collect()
}

/// Most blocks of pinned memory that the bystander's session keeps for the next time that its device memory moves.
const BYSTANDER_BLOCKS: u64 = 4;

/// How long after a refusal the loss of the context may be told.
const LOSS_PATIENCE: Duration = Duration::from_secs(2);

/// Holds the engine and looks at it.
pub struct Oracle {
    engine: InProcess,
    /// How long sessions that are over may take to go, and what they had to come back.
    patience: Duration,
    bystander: Bystander,
    /// Counts when nobody but the bystander is there.
    start: Counts,
    descriptors: usize,
    resident: u64,
    /// Sessions that are not gone.
    alive: HashSet<u64>,
    lost: bool,
    verbose: bool,
    /// Bytes that each session may have of a device.
    limit: Option<u64>,
    /// Sessions of earlier cases: they had the limits of theirs.
    earlier: usize,
    /// Sessions that the server or their own mistakes have ended.
    pub ended: u64,
    /// Moves of device memory to host memory.
    pub moves: u64,
}

impl Oracle {
    pub fn new(engine: InProcess, patience: Duration, verbose: bool) -> anyhow::Result<Oracle> {
        // What the engine makes when the first client needs it, such as the second device's context, is no leak.
        let mut first = engine.connect()?;
        for device in 0..first.welcome.device_count {
            use mpsshim_proto::message::{Attach, Op};
            let attach = Attach { device, flags: 0 };
            first.ask_as(0, Op::Attach, &attach, &[])?;
        }
        let session = first.welcome.session;
        drop(first);
        let bystander = Bystander::start(engine.connect()?)?;
        let mut oracle = Oracle {
            engine,
            patience,
            bystander,
            start: Counts::new(),
            descriptors: 0,
            resident: 0,
            alive: HashSet::from([session]),
            lost: false,
            verbose,
            limit: None,
            earlier: 0,
            ended: 0,
            moves: 0,
        };
        oracle.end_case()?;
        let turn = oracle.bystander.turn.clone();
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        oracle.start = oracle.steady()?;
        oracle.descriptors = open_descriptors()?;
        oracle.resident = resident_bytes()?;
        Ok(oracle)
    }

    /// Counts that have not changed for a while.
    fn steady(&self) -> anyhow::Result<Counts> {
        let began = Instant::now();
        let mut last = self.engine.counts();
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_millis(500) {
            ensure!(began.elapsed() < self.patience, "the counts never rest");
            std::thread::sleep(Duration::from_millis(10));
            let now = self.engine.counts();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(last)
    }

    /// A session; none once the context is lost.
    pub fn connect(&mut self) -> anyhow::Result<Option<Peer>> {
        match self.engine.connect() {
            Ok(peer) => {
                self.alive.insert(peer.welcome.session);
                Ok(Some(peer))
            }
            Err(error) => {
                self.await_loss()?;
                ensure!(self.lost, "{error}: {}", Progress::text());
                Ok(None)
            }
        }
    }

    /// The news of a lost context may come after what comes of it.
    fn await_loss(&mut self) -> anyhow::Result<()> {
        std::thread::sleep(Duration::from_millis(200));
        self.take_events()
    }

    /// A session did nothing for long. An error, unless the context is lost: a session at rest then waits for the next
    /// server, of which there is none here.
    pub fn note_stuck(&mut self, what: &str) -> anyhow::Result<()> {
        self.take_events()?;
        if self.lost {
            return Ok(());
        }
        Err(self.hung(what))
    }

    /// Orders a session's memory to host memory, or back; it may be busy for a few milliseconds.
    pub fn move_memory(&self, session: u64, out: bool) {
        self.engine.move_memory(MoveMemory {
            number: 0,
            session,
            out,
            patience_ms: 5,
        });
    }

    pub fn terminate(&self, session: u64) {
        self.engine.terminate(session);
    }

    pub fn is_lost(&self) -> bool {
        self.lost
    }

    pub fn longest_round(&self) -> Duration {
        Duration::from_nanos(self.bystander.longest.load(Ordering::Relaxed))
    }

    /// Of a hang, with what the threads do.
    pub fn hung(&self, what: &str) -> anyhow::Error {
        let mut text = format!("{what}: {}", Progress::text());
        for task in std::fs::read_dir("/proc/self/task")
            .into_iter()
            .flatten()
            .flatten()
        {
            let read = |name: &str| {
                let text = std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
                text.trim().to_owned()
            };
            let stat = read("stat");
            let state = stat.rsplit(") ").next().map(|rest| &rest[..1]);
            text += &format!(
                "\n  {} {}: {} {}",
                task.file_name().display(),
                read("comm"),
                state.unwrap_or("?"),
                read("wchan")
            );
        }
        anyhow!(text)
    }

    pub fn begin_case(&mut self, limits: Limits, limit: Option<u64>) {
        self.engine.set_limits(limits);
        self.limit = limit;
        self.earlier = self.alive.len();
    }

    fn take_events(&mut self) -> anyhow::Result<()> {
        let mut refused = None;
        for event in self.engine.events.try_iter() {
            match event {
                EngineEvent::Connected(_) => {}
                EngineEvent::ImagesChanged
                | EngineEvent::MemoryShort
                | EngineEvent::NeedsOwnServer(_)
                | EngineEvent::Work(..) => {}
                EngineEvent::MemoryMoved(_, _, outcome) => {
                    self.moves += u64::from(outcome.is_ok_and(|placement| placement.moved_out > 0));
                }
                EngineEvent::Gone(client, why) => {
                    if let Some(why) = why
                        && self.verbose
                    {
                        eprintln!("{} ended: {why}", client.session);
                    }
                    self.alive.remove(&client.session);
                }
                EngineEvent::Refused(_, status, why) => {
                    refused.get_or_insert((status, why));
                }
                EngineEvent::Fault { .. } => self.lost = true,
                EngineEvent::Stuck(why) => {
                    return Err(self.hung(&format!("the engine says that it is stuck: {why}")));
                }
            }
        }
        let Some((status, why)) = refused else {
            return Ok(());
        };
        // Other threads tell of the loss of the context, perhaps later.
        let until = Instant::now() + LOSS_PATIENCE;
        while !self.lost {
            match self.engine.events.recv_deadline(until) {
                Ok(EngineEvent::Fault { .. }) => self.lost = true,
                Ok(EngineEvent::Gone(client, _)) => drop(self.alive.remove(&client.session)),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        ensure!(
            self.lost,
            "a client was refused with {status}: {why}; {}",
            Progress::text()
        );
        Ok(())
    }

    /// What can be looked at at any time.
    pub fn glance(&mut self) -> anyhow::Result<()> {
        self.take_events()?;
        ensure!(!PANICKED.load(Ordering::SeqCst), "a thread panicked");
        if let Some(error) = self.bystander.error()
            && !self.lost
        {
            self.await_loss()?;
            ensure!(
                self.lost,
                self.hung(&format!("the bystander failed with {error}"))
            );
        }
        self.limits_hold()
    }

    /// Memory of a session that has gone counts a moment longer.
    fn limits_hold(&mut self) -> anyhow::Result<()> {
        let Some(limit) = self.limit.filter(|_| self.earlier == 0) else {
            return Ok(());
        };
        let began = Instant::now();
        while !self.lost {
            let found = self.engine.counts();
            let over = (0..2)
                .map(|device| format!("bytes-of-device-{device}"))
                .find(|name| {
                    let count = |counts: &Counts| counts.get(name).copied().unwrap_or(0);
                    count(&found) > count(&self.start) + SLACK + limit * self.alive.len() as u64
                });
            let Some(over) = over else {
                return Ok(());
            };
            if began.elapsed() > self.patience {
                let text = format!(
                    "{} sessions with a limit of {limit} bytes have too much: {over} is {:?}, was {:?}; {found:?}; {:?}",
                    self.alive.len(),
                    found.get(&over),
                    self.start.get(&over),
                    self.engine.usage(),
                );
                return Err(self.hung(&text));
            }
            std::thread::sleep(Duration::from_millis(5));
            self.take_events()?;
        }
        Ok(())
    }

    /// Waits until all sessions of the case are gone.
    pub fn end_case(&mut self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            self.glance()?;
            if self.alive.is_empty() || self.lost {
                return Ok(());
            }
            if began.elapsed() > self.patience {
                let left = format!("sessions {:?} do not end", self.alive);
                return Err(self.hung(&left));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Whether everything has come back.
    pub fn look(&mut self) -> anyhow::Result<()> {
        self.glance()?;
        if self.lost {
            return Ok(());
        }
        let turn = self.bystander.turn.clone();
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(differs) = self
            .engine
            .await_counts(&self.start, BYSTANDER_BLOCKS, self.patience)
        {
            let text: Vec<String> = differs
                .iter()
                .map(|(name, expected, found)| format!("{name}: {expected} before, {found} now"))
                .collect();
            return Err(self.hung(&format!("not everything came back ({})", text.join(", "))));
        }
        let began = Instant::now();
        while open_descriptors()? > self.descriptors + BYSTANDER_BLOCKS as usize {
            ensure!(
                began.elapsed() < self.patience,
                "{} descriptors before, now {:?}: {}",
                self.descriptors,
                descriptors(),
                Progress::text()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let resident = resident_bytes()?;
        ensure!(
            resident < self.resident + GROWTH,
            "{} bytes of memory before, {resident} now: {}",
            self.resident,
            Progress::text()
        );
        let threads = threads()?;
        ensure!(threads < 256, "{threads} threads: {}", Progress::text());
        Ok(())
    }

    /// Ends the engine.
    pub fn finish(mut self) {
        self.bystander.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.bystander.thread.take() {
            let _ = thread.join();
        }
        self.engine.shutdown();
    }
}
