//! Signal handlers of the program: one for faults of its own, and others that use managed memory.

use super::turns::World;
use super::*;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

const PAGE: usize = 4096;

/// The program's own page, whose faults the handler repairs.
static OWN_PAGE: AtomicU64 = AtomicU64::new(0);
static FAULTS: AtomicU32 = AtomicU32::new(0);
/// Whether the handler of faults uses managed memory too.
static TOUCHES: AtomicBool = AtomicBool::new(false);

/// Words of a managed block that a handler adds to; other bytes of the block are the device's.
struct Slots {
    at: AtomicU64,
    /// Bytes from one slot to the next.
    step: AtomicUsize,
    turn: AtomicUsize,
    model: [AtomicU32; SLOTS],
    /// A word that was wrong: its slot, and what was there.
    wrong: AtomicI32,
    got: AtomicU32,
}

const SLOTS: usize = 64;

impl Slots {
    const fn new() -> Slots {
        Slots {
            at: AtomicU64::new(0),
            step: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
            model: [const { AtomicU32::new(0) }; SLOTS],
            wrong: AtomicI32::new(-1),
            got: AtomicU32::new(0),
        }
    }

    fn place(&self, slot: usize) -> *mut u32 {
        (self.at.load(Ordering::SeqCst) as usize + slot * self.step.load(Ordering::SeqCst))
            as *mut u32
    }

    /// Reads the next slot, compares, and adds to it. For signal handlers.
    fn next(&self) {
        if self.at.load(Ordering::SeqCst) == 0 {
            return;
        }
        let turn = self.turn.fetch_add(1, Ordering::SeqCst);
        let slot = turn * 7 % SLOTS;
        let place = self.place(slot);
        // SAFETY: a word of a block that outlives the handler's use.
        let got = unsafe { place.read_volatile() };
        if got != self.model[slot].load(Ordering::SeqCst) {
            self.got.store(got, Ordering::SeqCst);
            self.wrong.store(slot as i32, Ordering::SeqCst);
        }
        let next = got.wrapping_add(turn as u32 + 1);
        self.model[slot].store(next, Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { place.write_volatile(next) };
    }

    /// Begins to use a block whose bytes are all 0.
    fn begin(&self, at: u64, step: usize) {
        self.step.store(step, Ordering::SeqCst);
        for word in &self.model {
            word.store(0, Ordering::SeqCst);
        }
        self.at.store(at, Ordering::SeqCst);
    }

    /// No handler uses it any more.
    fn end(&self, what: &str) -> Outcome {
        for slot in 0..SLOTS {
            let expected = self.model[slot].load(Ordering::SeqCst).to_le_bytes();
            compare(what, self.place(slot) as u64, &expected)?;
        }
        self.at.store(0, Ordering::SeqCst);
        match self.wrong.swap(-1, Ordering::SeqCst) {
            -1 => Ok(()),
            slot => Err(format!(
                "{what}: in the handler, slot {slot} was {:#x}",
                self.got.load(Ordering::SeqCst)
            )),
        }
    }
}

static OF_FAULTS: Slots = Slots::new();
static OF_ALARMS: Slots = Slots::new();
static OF_USERS: Slots = Slots::new();

unsafe extern "C" fn on_fault(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a siginfo_t of a fault.
    let at = unsafe { (*info).si_addr() } as u64;
    let page = OWN_PAGE.load(Ordering::SeqCst);
    if page == 0 || !(page..page + PAGE as u64).contains(&at) {
        const TEXT: &[u8] =
            b"signals: the program's handler got a fault that is not the program's\n";
        // SAFETY: writes a text and ends.
        unsafe {
            libc::write(1, TEXT.as_ptr().cast(), TEXT.len());
            libc::_exit(1);
        }
    }
    // SAFETY: the program's own page.
    unsafe {
        libc::mprotect(
            page as *mut c_void,
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
        )
    };
    FAULTS.fetch_add(1, Ordering::SeqCst);
    if TOUCHES.load(Ordering::SeqCst) {
        OF_FAULTS.next();
    }
}

unsafe extern "C" fn on_alarm(_: c_int) {
    OF_ALARMS.next();
}

unsafe extern "C" fn on_user(_: c_int) {
    OF_USERS.next();
}

fn install(signal: c_int, handler: usize, flags: c_int) -> Outcome<libc::sigaction> {
    // SAFETY: zeros are an empty action and mask.
    let (mut action, mut old) = unsafe { std::mem::zeroed::<(libc::sigaction, libc::sigaction)>() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    // SAFETY: both are complete.
    match unsafe { libc::sigaction(signal, &raw const action, &raw mut old) } {
        0 => Ok(old),
        _ => Err("sigaction failed".into()),
    }
}

fn restore(signal: c_int, old: &libc::sigaction) -> Outcome {
    // SAFETY: an action that `install` has given.
    match unsafe { libc::sigaction(signal, old, null_mut()) } {
        0 => Ok(()),
        _ => Err("sigaction failed".into()),
    }
}

fn handler_of_faults() -> usize {
    on_fault as *const () as usize
}

/// A stack for the handlers of this thread.
fn own_stack() -> Outcome {
    const BYTES: usize = 64 << 10;
    let stack = libc::stack_t {
        ss_sp: Box::leak(vec![0u8; BYTES].into_boxed_slice())
            .as_mut_ptr()
            .cast(),
        ss_flags: 0,
        ss_size: BYTES,
    };
    // SAFETY: a stack that lives on.
    match unsafe { libc::sigaltstack(&raw const stack, null_mut()) } {
        0 => Ok(()),
        _ => Err("sigaltstack failed".into()),
    }
}

/// The handler that was there before, and the page; installed before the driver is loaded.
pub fn before_the_driver() -> Outcome {
    // SAFETY: a new page.
    let page = unsafe {
        let (kind, all) = (
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            libc::PROT_READ | libc::PROT_WRITE,
        );
        libc::mmap(null_mut(), PAGE, all, kind, -1, 0)
    };
    if page == libc::MAP_FAILED {
        return Err("mmap failed".into());
    }
    OWN_PAGE.store(page as u64, Ordering::SeqCst);
    own_stack()?;
    install(
        libc::SIGSEGV,
        handler_of_faults(),
        libc::SA_SIGINFO | libc::SA_ONSTACK,
    )?;
    own_faults(3)
}

/// The program's handler must get each of these.
fn own_faults(count: u32) -> Outcome {
    let page = OWN_PAGE.load(Ordering::SeqCst);
    for number in 0..count {
        let before = FAULTS.load(Ordering::SeqCst);
        let protection = [libc::PROT_NONE, libc::PROT_READ][number as usize % 2];
        // SAFETY: the program's own page, which nobody refers to.
        unsafe { libc::mprotect(page as *mut c_void, PAGE, protection) };
        let at = page + u64::from(number) * 17 % PAGE as u64;
        store(at, number as u8);
        same("the program's own page", at, &[number as u8], &[load(at)])?;
        let handled = FAULTS.load(Ordering::SeqCst).wrapping_sub(before);
        if handled != 1 {
            return Err(format!(
                "a fault of the program's own came to its handler {handled} times"
            ));
        }
    }
    Ok(())
}

fn world<'a>(setup: &'a Setup, random: &mut Random) -> Outcome<World<'a>> {
    World::new(setup, random.number(), (setup.most / 16).max(16))
}

/// Turns of host and device with faults of the program's own among them.
fn turns_and_faults(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let mut world = world(setup, random)?;
    loop {
        for _ in 0..8 {
            world.turn()?;
        }
        own_faults(2)?;
        if Instant::now() > until {
            return world.end();
        }
    }
}

fn with_handler(flags: c_int, run: impl FnOnce() -> Outcome) -> Outcome {
    let old = install(libc::SIGSEGV, handler_of_faults(), libc::SA_SIGINFO | flags)?;
    let outcome = run();
    // SAFETY: only reads the action.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::sigaction(libc::SIGSEGV, std::ptr::null(), &raw mut found) };
    restore(libc::SIGSEGV, &old)?;
    if found.sa_sigaction != handler_of_faults() {
        return Err("sigaction does not give the program's handler".into());
    }
    outcome
}

fn masked(how: c_int, signals: &[c_int]) -> Outcome {
    // SAFETY: a mask is made and used.
    let status = unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut mask);
        for signal in signals {
            libc::sigaddset(&raw mut mask, *signal);
        }
        libc::pthread_sigmask(how, &raw const mask, null_mut())
    };
    match status {
        0 => Ok(()),
        _ => Err("pthread_sigmask failed".into()),
    }
}

/// Interrupts this thread every millisecond by a timer, and at random by another thread.
fn interrupted(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let step = [68, 1028, 4100][random.below(3)];
    let len = SLOTS * step;
    let blocks = [allocate(len)?, allocate(len)?];
    for at in blocks {
        host(at, len).fill(0);
    }
    OF_ALARMS.begin(blocks[0], step);
    OF_USERS.begin(blocks[1], step);
    let flags = [0, libc::SA_ONSTACK][random.below(2)] | libc::SA_RESTART;
    let old = [
        install(libc::SIGALRM, on_alarm as *const () as usize, flags)?,
        install(libc::SIGUSR1, on_user as *const () as usize, flags)?,
    ];
    let timer = |microseconds: i64| {
        let every = libc::timeval {
            tv_sec: 0,
            tv_usec: microseconds,
        };
        let timer = libc::itimerval {
            it_interval: every,
            it_value: every,
        };
        // SAFETY: a complete struct.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, null_mut()) };
    };
    // SAFETY: the thread's own handle, used while the thread runs.
    let own = unsafe { libc::pthread_self() };
    let done = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let mut pauses = Random::new(random.number());
        let done = &done;
        scope.spawn(move || {
            // The timer's signals are for the other thread.
            let _ = masked(libc::SIG_BLOCK, &[libc::SIGALRM, libc::SIGUSR1]);
            while !done.load(Ordering::SeqCst) {
                // SAFETY: the thread waits for this one.
                unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                std::thread::sleep(Duration::from_micros(pauses.below(2000) as u64));
            }
        });
        timer(1000);
        let outcome = interrupted_turns(setup, random, until, (blocks, step));
        timer(0);
        done.store(true, Ordering::SeqCst);
        outcome
    });
    // What is pending comes at the next call.
    std::thread::sleep(Duration::from_millis(2));
    restore(libc::SIGALRM, &old[0])?;
    restore(libc::SIGUSR1, &old[1])?;
    outcome?;
    OF_ALARMS.end("of SIGALRM's handler")?;
    OF_USERS.end("of SIGUSR1's handler")?;
    blocks.into_iter().try_for_each(free)
}

/// Turns of other blocks, kernels that add to the bytes beside the handlers' words, and faults of the program's own.
fn interrupted_turns(
    setup: &Setup,
    random: &mut Random,
    until: Instant,
    (blocks, step): ([u64; 2], usize),
) -> Outcome {
    let mut world = world(setup, random)?;
    let stream = stream()?;
    let mut sums = [0u8; 2];
    loop {
        for _ in 0..4 {
            world.turn()?;
        }
        for (at, sum) in blocks.iter().zip(&mut sums) {
            let value = random.number() as u32;
            let work = Work {
                to: at + 4,
                count: SLOTS * (step - 4),
                value,
                step: step as u32,
                width: step as u32 - 4,
                ..Work::default()
            };
            setup.kernels.launch(setup.kernels.stride, stream, &work)?;
            *sum = sum.wrapping_add(value as u8);
        }
        world.turn()?;
        wait(random, stream)?;
        for (at, sum) in blocks.iter().zip(sums) {
            for slot in 0..SLOTS {
                let at = at + (slot * step) as u64 + 4;
                compare("beside a handler's word", at, &vec![sum; step - 4])?;
            }
        }
        own_faults(1)?;
        let ran = |word: &AtomicUsize| word.load(Ordering::SeqCst) != 0;
        // A busy machine may run neither the other thread nor the timer for a while.
        if Instant::now() > until && ran(&OF_ALARMS.turn) && ran(&OF_USERS.turn) {
            must!(cuStreamDestroy_v2, stream);
            return world.end();
        }
    }
}

/// The handler of the program's own faults uses managed memory that the device had last.
fn nested(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let step = 1028;
    let len = SLOTS * step;
    let at = allocate(len)?;
    host(at, len).fill(0);
    OF_FAULTS.begin(at, step);
    let mut sum = 0u8;
    let outcome = loop {
        let value = random.number() as u32;
        let work = Work {
            to: at + 4,
            count: SLOTS * (step - 4),
            value,
            step: step as u32,
            width: step as u32 - 4,
            ..Work::default()
        };
        let kernels = &setup.kernels;
        kernels.launch(kernels.stride, CUstream::NULL, &work)?;
        sum = sum.wrapping_add(value as u8);
        must!(cuCtxSynchronize);
        TOUCHES.store(true, Ordering::SeqCst);
        let outcome = own_faults(3);
        TOUCHES.store(false, Ordering::SeqCst);
        if outcome.is_err() || Instant::now() > until {
            break outcome;
        }
    };
    outcome?;
    for slot in 0..SLOTS {
        let at = at + (slot * step) as u64 + 4;
        compare(
            "beside the words of the handler of faults",
            at,
            &vec![sum; step - 4],
        )?;
    }
    OF_FAULTS.end("of the handler of faults")?;
    free(at)
}

/// Threads in which SIGSEGV, or all signals, are blocked.
fn blocked(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let all: Vec<c_int> = (1..32).collect();
    let mut threads: Vec<Box<dyn FnOnce() -> Outcome + Send + '_>> = Vec::new();
    for signals in [vec![libc::SIGSEGV], all] {
        let mut random = Random::new(random.number());
        threads.push(Box::new(move || {
            setup.enter()?;
            masked(libc::SIG_BLOCK, &signals)?;
            let mut world = world(setup, &mut random)?;
            while Instant::now() < until {
                world.turn()?;
            }
            world.end()
        }));
    }
    together(threads)?;
    // This thread, and the signal is not blocked afterwards.
    masked(libc::SIG_BLOCK, &[libc::SIGSEGV])?;
    let mut world = world(setup, random)?;
    for _ in 0..50 {
        world.turn()?;
    }
    world.end()?;
    masked(libc::SIG_UNBLOCK, &[libc::SIGSEGV])?;
    own_faults(2)
}

/// The program ignores SIGSEGV or leaves it at its default; no fault of its own occurs.
fn without_handler(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    for action in [libc::SIG_DFL, libc::SIG_IGN] {
        let old = install(libc::SIGSEGV, action, 0)?;
        let mut world = world(setup, random)?;
        let mut outcome = Ok(());
        for _ in 0..60 {
            outcome = world.turn();
            if outcome.is_err() || Instant::now() > until {
                break;
            }
        }
        outcome?;
        world.end()?;
        restore(libc::SIGSEGV, &old)?;
    }
    Ok(())
}

type Case = fn(&Setup, &mut Random, Instant) -> Outcome;

const CASES: [(&str, Case); 7] = [
    ("installed before the driver", turns_and_faults),
    ("on a stack of its own", |setup, random, until| {
        with_handler(libc::SA_ONSTACK, || turns_and_faults(setup, random, until))
    }),
    ("on the thread's stack", |setup, random, until| {
        with_handler(0, || turns_and_faults(setup, random, until))
    }),
    ("interrupted", interrupted),
    ("blocked", blocked),
    ("without a handler", without_handler),
    ("nested", nested),
];

pub fn signals(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    if OWN_PAGE.load(Ordering::SeqCst) == 0 {
        // Among other modes, the driver is there already.
        before_the_driver()?;
    }
    let cases: Vec<_> = CASES
        .iter()
        .filter(|(name, _)| !setup.without.iter().any(|without| without == name))
        .collect();
    let each = until.saturating_duration_since(Instant::now()) / cases.len().max(1) as u32;
    for (name, case) in cases {
        case(setup, random, Instant::now() + each).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}
