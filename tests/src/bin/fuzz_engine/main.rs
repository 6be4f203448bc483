//! Fuzzes the engine of mps-server: structured random messages of several sessions at once, on softgpu, in one process.
//!
//! A run is a row of cases, each with sessions of its own. What happens in a case follows from the seed and the number of
//! the case, up to how threads happen to run. docs/fuzzing.md says what is looked for and how to see a failure again.

mod oracle;
mod summary;

use anyhow::Context;
use clap::Parser;
use mpsshim_model::limits::Limits;
use mpsshim_model::policy::{MarkKind, Oversubscription};
use mpsshim_proto::segment::SEGMENT_LEN;
use mpsshim_tests::artifacts::driver;
use mpsshim_tests::fuzzing::client::{Client, Common, Sent};
use mpsshim_tests::fuzzing::images::Images;
use mpsshim_tests::fuzzing::message::{Maker, Rules};
use mpsshim_tests::in_process::InProcess;
use oracle::{Oracle, Progress};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use summary::{Part, Summary};

/// How long a message may wait for a session of which no stream waits for its client. Far longer than the server needs:
/// the machine may be busy with other things.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same where streams wait for the client that sends it.
const SHORT_PATIENCE: Duration = Duration::from_millis(20);
/// Memory that a client of a limited case may have of each device, bytes.
const LIMIT: u64 = 32 << 20;
/// Memory of a device, bytes.
const DEVICE_MEMORY: &str = "512M";

/// Fuzzes the engine of mps-server in one process, on softgpu.
#[derive(Parser, Debug)]
#[command(disable_version_flag = true)]
struct Options {
    /// What everything random follows from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The first case
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Messages to send, at least
    #[arg(long, default_value_t = 200_000)]
    messages: u64,
    /// Cases at most
    #[arg(long)]
    cases: Option<u64>,
    /// The driver [default: the softgpu that was built]
    #[arg(long)]
    driver: Option<PathBuf>,
    /// Seconds that sessions which are over may take to go, and what they had to come back
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Print each message, and what the server refuses
    #[arg(long)]
    verbose: bool,
    /// Print at the end what was sent of each kind, how it went and what took the time
    #[arg(long)]
    summary: bool,
    /// Messages that earlier processes of this run have sent
    #[arg(long, default_value_t = 0, hide = true)]
    sent: u64,
    /// Contexts that they have lost
    #[arg(long, default_value_t = 0, hide = true)]
    lost: u64,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fuzz_engine: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> anyhow::Result<()> {
    let images = Images::read().context("images of the repository")?;
    // SAFETY: no other thread runs yet.
    unsafe {
        std::env::set_var("SOFTGPU_DEVICES", "2");
        std::env::set_var("SOFTGPU_MEMORY", DEVICE_MEMORY);
    }
    let path = options.driver.clone().unwrap_or_else(driver);
    oracle::watch_for_crashes();
    let marks = [MarkKind::Auto, MarkKind::Written, MarkKind::Kernel];
    let marks = marks[(options.seed % 3) as usize];
    let engine = InProcess::start(&path, marks).context("the engine")?;
    let mut oracle = Oracle::new(
        engine,
        Duration::from_secs(options.patience),
        options.verbose,
    )?;
    if options.summary || options.verbose {
        Summary::listen(options.verbose);
    }
    let mut summary = Summary::default();
    let began = Instant::now();
    let mut told = began;
    let mut sent = 0;
    let mut case = options.from;
    while options.sent + sent < options.messages
        && options
            .cases
            .is_none_or(|cases| case - options.from < cases)
    {
        Progress::begin(options.seed, case);
        sent += run_case(&options, case, &images, &mut oracle, &mut summary)?;
        case += 1;
        if oracle.is_lost() {
            if options.summary {
                print!("{}", summary.text());
            }
            return go_on(&options, case, options.sent + sent);
        }
        summary.time(Part::Look, || oracle.look())?;
        if told.elapsed() > Duration::from_secs(10) {
            told = Instant::now();
            tell(&options, case, sent, began, &oracle);
        }
    }
    tell(&options, case, sent, began, &oracle);
    if options.summary {
        print!("{}", summary.text());
    }
    let total = options.sent + sent;
    println!("fuzz_engine: passed, {total} messages");
    oracle.finish();
    Ok(())
}

fn tell(options: &Options, case: u64, sent: u64, began: Instant, oracle: &Oracle) {
    let speed = sent as f64 / began.elapsed().as_secs_f64();
    println!(
        "fuzz_engine: seed {}, cases up to {case}, {} messages, {speed:.0} a second, {} sessions ended by the server, \
         {} moves of device memory, {} contexts lost, longest round of the bystander {:.0} ms",
        options.seed,
        options.sent + sent,
        oracle.ended,
        oracle.moves,
        options.lost,
        oracle.longest_round().as_secs_f64() * 1e3,
    );
}

/// A context is lost for good: the rest is another process's.
fn go_on(options: &Options, case: u64, sent: u64) -> anyhow::Result<()> {
    println!("fuzz_engine: case {} lost the context", case - 1);
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--seed", &options.seed.to_string()])
        .args(["--from", &case.to_string()])
        .args(["--messages", &options.messages.to_string()])
        .args(["--sent", &sent.to_string()])
        .args(["--lost", &(options.lost + 1).to_string()])
        .args(["--patience", &options.patience.to_string()]);
    if let Some(cases) = options.cases {
        let left = cases.saturating_sub(case - options.from);
        command.args(["--cases", &left.to_string()]);
    }
    if let Some(driver) = &options.driver {
        command.arg("--driver").arg(driver);
    }
    if options.summary {
        command.arg("--summary");
    }
    if options.verbose {
        command.arg("--verbose");
    }
    Err(command.exec()).context("the next process")
}

/// What a case is like.
struct Case<'a> {
    images: &'a Images,
    rules: Rules,
    verbose: bool,
}

/// Runs one case; how many messages it sent.
fn run_case(
    options: &Options,
    number: u64,
    images: &Images,
    oracle: &mut Oracle,
    summary: &mut Summary,
) -> anyhow::Result<u64> {
    let rng = &mut SmallRng::seed_from_u64(
        options
            .seed
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(number),
    );
    let case = Case {
        images,
        rules: Rules {
            waits: rng.random_ratio(1, 4),
            ..Rules::default()
        },
        verbose: options.verbose,
    };
    let limited = rng.random_ratio(1, 2);
    let mut limits = match limited {
        true => Limits {
            memory: [(0, LIMIT), (1, LIMIT)].into(),
            ..Limits::default()
        },
        false => Limits::default(),
    };
    if rng.random_ratio(1, 2) {
        limits.oversubscription.default = Oversubscription::On;
    }
    oracle.begin_case(limits, limited.then_some(LIMIT));
    let mut common = Common::default();
    let mut clients = Vec::new();
    for _ in 0..rng.random_range(2..5) {
        clients.extend(summary.time(Part::Connect, || connect(&case, oracle, &mut common, rng))?);
    }
    if oracle.is_lost() {
        return Ok(0);
    }
    let messages = rng.random_range(500..6000);
    let mut sent = 0;
    let mut stuck = 0;
    for step in 0..messages {
        Progress::step(step);
        let at = rng.random_range(0..clients.len());
        let before = sent;
        let gone = match rng.random_range(0..4000) {
            0 => Some("left"),
            1 => {
                oracle.terminate(clients[at].peer.welcome.session);
                None
            }
            2..8 => {
                scribble(&clients[at], rng);
                None
            }
            8..12 => {
                forge(&mut clients[at], rng);
                None
            }
            12..60 => {
                clients[at].release_waits(rng);
                None
            }
            60..90 => {
                let session = clients[at].peer.welcome.session;
                oracle.move_memory(session, rng.random_ratio(3, 4));
                if rng.random_ratio(1, 2) {
                    // Otherwise its next call comes before it is idle, or in the middle of the move.
                    std::thread::sleep(Duration::from_millis(rng.random_range(1..8)));
                }
                None
            }
            _ => {
                sent += 1;
                match exchange(&case, &mut clients[at], &mut common, summary, rng) {
                    Sent::Fine => None,
                    Sent::Ended(_) => {
                        oracle.ended += 1;
                        Some("ended")
                    }
                    Sent::Stuck if case.rules.waits => {
                        stuck += 1;
                        clients[at].release_waits(rng);
                        // A session that waits for its client for ever is left as it is, which is its end.
                        (stuck % 8 == 0).then_some("stuck")
                    }
                    Sent::Stuck => {
                        oracle.note_stuck("a session's message was not answered or taken")?;
                        Some("stuck")
                    }
                }
            }
        };
        if let Some(why) = gone {
            if case.verbose {
                eprintln!("{step}: client {at} {why}");
            }
            let old = clients.swap_remove(at);
            drop(old);
            if oracle.is_lost() {
                break;
            }
            clients
                .extend(summary.time(Part::Connect, || connect(&case, oracle, &mut common, rng))?);
        }
        if sent != before && sent % 64 == 0 {
            oracle.glance()?;
        }
        if oracle.is_lost() {
            break;
        }
    }
    if !oracle.is_lost() && !case.rules.waits {
        // Half of them wait for the end of what they have sent.
        for client in &mut clients {
            if rng.random_ratio(1, 2)
                && summary.time(Part::Settle, || client.settle()) == Sent::Stuck
            {
                oracle.note_stuck("a session's ring was not emptied")?;
                break;
            }
        }
    }
    drop(clients);
    summary.time(Part::End, || oracle.end_case())?;
    Ok(sent)
}

fn connect(
    case: &Case<'_>,
    oracle: &mut Oracle,
    common: &mut Common,
    rng: &mut SmallRng,
) -> anyhow::Result<Option<Client>> {
    let patience = match case.rules.waits {
        true => SHORT_PATIENCE,
        false => PATIENCE,
    };
    let Some(peer) = oracle.connect()? else {
        return Ok(None);
    };
    let mut client = Client::new(peer, patience)?;
    if rng.random_ratio(9, 10)
        && let Err(status) = client.prepare(common, rng)
        && !oracle.is_lost()
    {
        // The devices may be full.
        if status.0 != mpsshim_api::cuda::CUDA_ERROR_OUT_OF_MEMORY.0 {
            return Err(oracle.hung(&format!("a new session could not be made ready: {status}")));
        }
    }
    Ok(Some(client))
}

fn exchange(
    case: &Case<'_>,
    client: &mut Client,
    common: &mut Common,
    summary: &mut Summary,
    rng: &mut SmallRng,
) -> Sent {
    let draft = Maker {
        client,
        common,
        images: case.images,
        rules: case.rules,
        rng,
    }
    .any();
    if case.verbose {
        eprintln!("{} {draft:?}", client.peer.welcome.session);
    }
    Progress::message(draft.op as u16);
    let (op, began) = (draft.op, Instant::now());
    let (sent, status) = client.send(draft, common, rng);
    summary.count(op, &sent, status, began.elapsed());
    if case.verbose && sent != Sent::Fine {
        eprintln!("  {sent:?}");
    }
    sent
}

/// Writes anything anywhere into the shared memory, while the server reads it.
fn scribble(client: &Client, rng: &mut SmallRng) {
    let mut bytes = [0; 64];
    for _ in 0..rng.random_range(1..16) {
        let len = rng.random_range(1..bytes.len());
        rng.fill_bytes(&mut bytes[..len]);
        let at = rng.random_range(0..SEGMENT_LEN - len);
        client.peer.scribble(at, &bytes[..len]);
    }
    client.peer.ring();
}

/// A header that lies about the message's length, and a head that runs away.
fn forge(client: &mut Client, rng: &mut SmallRng) {
    match rng.random_range(0..3) {
        0 => client.peer.publish_head(rng.random()),
        1 => {
            let len = rng.random_range(0..1 << 18);
            client.peer.put_header(len, rng.random_range(0..700), 16);
        }
        _ => client
            .peer
            .put_header(rng.random(), rng.random(), rng.random_range(0..1 << 22)),
    }
}
