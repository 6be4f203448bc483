//! `mps-control trace`: what is in the file, and what cannot be traced.

use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Done, Place, other_user, wait_until};
use mpsshim_tests::programs::{Running, client, preloaded, succeed};
use mpsshim_tests::scene::{daemon, daemon_with};
use mpsshim_tests::survivors::Survivor;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Times have three digits behind the microsecond.
const DIGIT: f64 = 0.002;

/// A slice, microseconds.
#[derive(Clone, Debug)]
struct Slice {
    pid: u64,
    tid: u64,
    name: String,
    category: String,
    begin: f64,
    end: f64,
    args: Value,
}

/// A trace that was read, and found to keep to the format.
struct Trace {
    slices: Vec<Slice>,
    /// By process, and by process and thread.
    names: BTreeMap<(u64, Option<u64>), String>,
    /// Greatest percentage of the time in which each process waited for the device.
    waits: BTreeMap<u64, u64>,
    /// Greatest rates of each process's copies of managed memory: to the host, to devices.
    managed: BTreeMap<u64, [u64; 2]>,
    /// The same of device memory.
    moved: BTreeMap<u64, [u64; 2]>,
}

impl Trace {
    fn read(path: &PathBuf) -> Trace {
        let text = fs::read_to_string(path).expect("a file");
        let events: Vec<Value> = serde_json::from_str(&text).expect("JSON");
        let (mut slices, mut names) = (Vec::new(), BTreeMap::new());
        let (mut waits, mut managed) = (BTreeMap::new(), BTreeMap::new());
        let mut moved = BTreeMap::new();
        for event in &events {
            if event["ph"] == "C" {
                assert!(event["ts"].as_f64() > Some(0.0), "{event}");
                let pid = event["pid"].as_u64().expect("a process");
                let rates = match event["name"].as_str() {
                    Some("managed memory, bytes/s") => Some(&mut managed),
                    Some("moves of device memory, bytes/s") => Some(&mut moved),
                    _ => None,
                };
                if let Some(rates) = rates {
                    let most: &mut [u64; 2] = rates.entry(pid).or_default();
                    for (most, direction) in most.iter_mut().zip(["to the host", "to devices"]) {
                        let rate = event["args"][direction].as_u64().expect("a rate");
                        *most = rate.max(*most);
                    }
                    continue;
                }
                let percentage = event["args"]["%"].as_u64().expect("a percentage");
                assert!(percentage <= 100, "{event}");
                if event["name"] == "waits for device memory" {
                    continue;
                }
                assert_eq!(event["name"], "waits for the device");
                let most = waits.entry(pid).or_insert(0);
                *most = percentage.max(*most);
                continue;
            }
            let [pid, tid] = ["pid", "tid"].map(|name| event[name].as_u64().expect(name));
            let name = event["name"].as_str().expect("a name").to_owned();
            match event["ph"].as_str() {
                Some("M") => {
                    let key = match name.as_str() {
                        "process_name" => (pid, None),
                        "thread_name" => (pid, Some(tid)),
                        _ => continue,
                    };
                    let shown = event["args"]["name"].as_str().expect("a name");
                    names.insert(key, shown.to_owned());
                }
                Some("X") => {
                    let [begin, length] =
                        ["ts", "dur"].map(|name| event[name].as_f64().expect(name));
                    assert!(begin > 0.0 && length >= 0.0, "{event}");
                    assert!(
                        names.contains_key(&(pid, Some(tid))),
                        "{event} is on no track"
                    );
                    slices.push(Slice {
                        pid,
                        tid,
                        name,
                        category: event["cat"].as_str().expect("a category").to_owned(),
                        begin,
                        end: begin + length,
                        args: event["args"].clone(),
                    });
                }
                other => panic!("{other:?}"),
            }
        }
        let trace = Trace {
            slices,
            names,
            waits,
            managed,
            moved,
        };
        trace.tracks_are_in_order();
        let end = events.last().expect("events");
        assert_eq!(end["name"], "trace_end");
        assert_eq!(end["args"]["slices"], trace.slices.len());
        trace
    }

    /// On one track time goes on, and slices do not overlap.
    fn tracks_are_in_order(&self) {
        let mut ends: BTreeMap<(u64, u64), f64> = BTreeMap::new();
        for slice in &self.slices {
            let end = ends.entry((slice.pid, slice.tid)).or_insert(0.0);
            assert!(slice.begin >= *end - DIGIT, "{slice:?} begins before {end}");
            *end = slice.end;
        }
    }

    fn track(&self, slice: &Slice) -> &str {
        &self.names[&(slice.pid, Some(slice.tid))]
    }

    /// Slices of a process on tracks with names that begin like this.
    fn of(&self, pid: u32, track: &str) -> Vec<&Slice> {
        let fits =
            |slice: &&Slice| slice.pid == u64::from(pid) && self.track(slice).starts_with(track);
        self.slices.iter().filter(fits).collect()
    }
}

fn overlap(one: &[&Slice], other: &[&Slice]) -> bool {
    let both = |a: &Slice, b: &Slice| a.begin + DIGIT < b.end && b.begin + DIGIT < a.end;
    one.iter().any(|a| other.iter().any(|b| both(a, b)))
}

fn ok(done: &Done) -> String {
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    done.out.clone()
}

fn start(place: &Place) -> PathBuf {
    let path = place.path().join("trace of today.json");
    let done = place.control(&["trace", "start", path.to_str().expect("UTF-8")]);
    assert_eq!(ok(&done), "");
    path
}

/// The trace, and how many records were lost: those of a client that submits faster than they are collected.
fn stop(place: &Place, path: &PathBuf) -> (Trace, u64) {
    let said = ok(&place.control(&["trace", "stop"]));
    let trace = Trace::read(path);
    let words: Vec<&str> = said.split(' ').collect();
    let lost = words.get(2).and_then(|word| word.parse().ok());
    let lost: u64 = lost.unwrap_or_else(|| panic!("{said}"));
    let expected = format!(
        "{} slices, {lost} lost, in {}\n",
        trace.slices.len(),
        path.display()
    );
    assert_eq!(said, expected);
    (trace, lost)
}

/// A program that works on command, so that all its records find room however late they are collected.
fn obedient(place: &Place) -> Running {
    let program = env!("CARGO_BIN_EXE_survivor");
    Running::start_until(&mut preloaded(program, place.pipe()), "started")
}

fn tell(running: &mut Running, command: &str, answer: &str) {
    running.say(command);
    let said = running.line();
    assert!(said.starts_with(answer), "{command}: {said}");
}

#[test]
fn two_clients_side_by_side() {
    let place = daemon();
    let mut first = obedient(&place);
    let path = start(&place);
    // One is there already, the other comes.
    let mut second = obedient(&place);
    for _ in 0..4 {
        tell(&mut first, "round", "ok");
        tell(&mut second, "round", "ok");
    }
    // The first one's kernel is in flight until the end.
    tell(&mut first, "launch 1000000", "launched");
    tell(&mut second, "launch 0", "launched");
    let (trace, lost) = stop(&place, &path);
    assert_eq!(lost, 0);
    for running in [&first, &second] {
        let pid = running.pid();
        assert_eq!(
            trace.names[&(pid.into(), None)],
            format!("survivor ({pid})")
        );
        let given = trace.of(pid, "submissions");
        let done = trace.of(pid, "stream ");
        // In flight when the trace began.
        let done: Vec<&Slice> = done
            .into_iter()
            .filter(|slice| !slice.name.contains("earlier work"))
            .collect();
        let waits = trace.of(pid, "waits");
        let kernels = |slices: &[&Slice]| {
            let is_fill = |slice: &&&Slice| slice.name.split([' ', ',']).any(|word| word == "fill");
            slices.iter().filter(is_fill).count()
        };
        // Kernels that are found to be done together are one slice.
        assert!(
            kernels(&given) > 8 && kernels(&done) > 0 && waits.len() > 3,
            "{given:?} {done:?}"
        );
        let launch = given
            .iter()
            .find(|slice| slice.name == "fill")
            .expect("a launch");
        assert_eq!(
            (launch.category.as_str(), &launch.args["blocks"]),
            ("submission", &16.into())
        );
        assert!(
            waits
                .iter()
                .all(|wait| wait.name == "wait" && wait.category == "wait")
        );
        // What is done was given before, as often.
        let count = |slice: &&Slice| slice.args["operations"].as_u64().unwrap_or(1);
        let operations: u64 = done.iter().map(count).sum();
        let submitted = given
            .iter()
            .filter(|slice| slice.category == "submission")
            .count();
        // A slice that was not over, or has earlier work in it, has operations that are not counted here.
        let missing = (submitted as u64).checked_sub(operations);
        assert!(
            missing.is_some_and(|missing| missing < 64),
            "{submitted} given, {operations} done"
        );
        for (first, kernel) in given.iter().zip(&done).take(1) {
            assert!(first.begin <= kernel.begin + DIGIT, "{first:?} {kernel:?}");
        }
    }
    let copies = trace.of(second.pid(), "submissions");
    let large =
        |slice: &&&Slice| slice.name == "copy" && slice.args["bytes"].as_u64() >= Some(4096);
    assert!(copies.iter().any(|slice| large(&slice)), "{copies:?}");
    assert!(
        copies
            .iter()
            .any(|slice| slice.category == "call" && slice.name == "ImageLoad")
    );
    let [one, other] = [&first, &second].map(|running| trace.of(running.pid(), "stream "));
    assert!(overlap(&one, &other), "both had work at the same time");
    // Neither client is traced any more, and another trace can begin.
    let size = fs::metadata(&path).expect("a file").len();
    tell(&mut first, "launch 0", "launched");
    tell(&mut second, "launch 0", "launched");
    assert_eq!(fs::metadata(&path).expect("a file").len(), size);
    let path = start(&place);
    tell(&mut first, "launch 0", "launched");
    tell(&mut second, "launch 0", "launched");
    let (trace, lost) = stop(&place, &path);
    assert_eq!(lost, 0);
    for running in [&first, &second] {
        assert!(!trace.of(running.pid(), "stream ").is_empty());
    }
}

#[test]
fn turns_of_direct_mode() {
    let place = daemon_with(&[("MPSSHIM_TURNS", "always"), ("MPSSHIM_MODE", "direct")]);
    let path = start(&place);
    let both = [0, 1].map(|_| Running::start_until(&mut client(&place, &["work"]), "busy"));
    let had = |running: &Running| {
        let pid = running.pid().to_string();
        let rows = place.ps();
        let row = rows.iter().find(|row| row["pid"] == pid);
        row.and_then(|row| row["turns"].parse().ok()).unwrap_or(0.0)
    };
    wait_until("each has had some turns", || {
        both.iter().all(|running| had(running) >= 4.0)
    });
    let (trace, _) = stop(&place, &path);
    let turns = both.each_ref().map(|running| {
        let all = trace.of(running.pid(), "turns");
        let of = |name: &str| -> Vec<&Slice> {
            all.iter()
                .copied()
                .filter(|slice| slice.name == name)
                .collect()
        };
        assert!(of("waits for a turn").len() > 1, "{all:?}");
        of("has a turn")
    });
    assert!(turns.iter().all(|turns| turns.len() > 1), "{turns:?}");
    // The turn is passed on in between.
    assert!(!overlap(&turns[0], &turns[1]), "{turns:?}");
}

#[test]
fn waits_for_the_device_are_counted() {
    let place = daemon();
    let path = start(&place);
    let flood = || Running::start_until(&mut client(&place, &["flood"]), "busy");
    let both = [flood(), flood()];
    wait_until("each has waited", || {
        let rows = place.ps();
        let waited = |row: &HashMap<String, String>| row["device_wait_ms"].parse().ok();
        rows.len() == 2 && rows.iter().all(|row| waited(row) > Some(100.0))
    });
    // The latest values are 10 ms old at most.
    std::thread::sleep(Duration::from_millis(50));
    let pids = [&both[0], &both[1]].map(|one| u64::from(one.pid()));
    both.into_iter().for_each(Running::kill);
    let _ = place.control(&["trace", "stop"]);
    let waits = Trace::read(&path).waits;
    assert!(
        pids.iter().all(|pid| waits.get(pid) > Some(&10)),
        "{waits:?}"
    );
}

#[test]
fn moves_of_device_memory_are_counted() {
    let place = daemon_with(&[
        ("SOFTGPU_MEMORY", "56M"),
        ("MPSSHIM_OVERSUBSCRIPTION", "on"),
    ]);
    let path = start(&place);
    let mut both = [(); 2].map(|()| Survivor::start(&place));
    for _ in 0..2 {
        both.iter_mut().for_each(Survivor::round);
    }
    // The latest values are 10 ms old at most.
    std::thread::sleep(Duration::from_millis(50));
    let moved = stop(&place, &path).0.moved;
    for one in &both {
        let rates = moved.get(&one.program.pid().into());
        assert!(
            rates.is_some_and(|[host, device]| *host > 0 && *device > 0),
            "{moved:?}"
        );
    }
    both.into_iter().for_each(Survivor::end);
}

#[test]
fn managed_memory_that_moves_is_counted() {
    let place = daemon();
    let path = start(&place);
    let program = artifact("managed");
    let mut program = preloaded(program, place.pipe());
    program.args(["turns", "--seconds", "0.5", "--most", "60000"]);
    succeed(program.args(["--blocks", "300"]));
    let managed = stop(&place, &path).0.managed;
    let moved = managed
        .values()
        .any(|rates| rates.iter().all(|rate| *rate > 0));
    assert!(moved, "{managed:?}");
}

#[test]
fn servers_that_come_later_write_too() {
    let place = daemon();
    let path = start(&place);
    let mut servers = BTreeSet::new();
    for _ in 0..2 {
        let run = Running::start_until(&mut client(&place, &["work"]), "busy");
        let server = place.control(&["get_server_list"]).out.trim().to_owned();
        run.kill();
        assert_eq!(place.control(&["shutdown_server", &server]).code, 0);
        servers.insert(server);
    }
    let (trace, _) = stop(&place, &path);
    assert_eq!(servers.len(), 2);
    let processes: BTreeSet<u64> = trace.slices.iter().map(|slice| slice.pid).collect();
    assert_eq!(processes.len(), 2);
    // Of a daemon that ends too.
    let path = start(&place);
    succeed(&mut client(&place, &["work", "2"]));
    assert_eq!(place.control(&["quit"]).code, 0);
    assert!(!Trace::read(&path).slices.is_empty());
}

#[test]
fn what_cannot_be_traced_is_said() {
    let place = daemon();
    let run = Running::start_until(&mut client(&place, &["idle"]), "ready");
    let folder = place.path().to_str().expect("UTF-8");
    let path = |name: &str| format!("{folder}/{name}");
    let says = |arguments: &[&str], expected: &str| {
        let done = place.control(arguments);
        assert_eq!(
            (done.code, done.out),
            (1, format!("{expected}\n")),
            "{arguments:?}"
        );
    };
    says(&["trace", "stop"], "no trace is being recorded");
    let missing = path("no/such/folder");
    let why = format!("cannot write {missing}: No such file or directory (os error 2)");
    says(&["trace", "start", &missing], &why);
    says(
        &["trace", "start", folder],
        &format!("{folder} is not a regular file"),
    );
    says(
        &["trace", "start", "/dev/null"],
        "/dev/null is not a regular file",
    );
    let usage = "trace: start and a file, or stop, expected; usage: trace start FILE|stop";
    for wrong in [
        &["trace"][..],
        &["trace", "start"],
        &["trace", "stop", "x"],
        &["trace", "on"],
    ] {
        says(wrong, usage);
    }
    // A second one leaves the first, and no file.
    let (first, second) = (path("first"), path("second"));
    fs::write(&first, "what was there before").expect("write");
    assert_eq!(ok(&place.control(&["trace", "start", &first])), "");
    let why = format!("a trace is being recorded already, to {first}; \"trace stop\" ends it");
    says(&["trace", "start", &second], &why);
    assert!(!PathBuf::from(&second).exists());
    ok(&place.control(&["trace", "stop"]));
    Trace::read(&PathBuf::from(&first));
    says(&["trace", "stop"], "no trace is being recorded");
    // The file is opened by who asks, who must be the owner or root.
    if let Some(user) = other_user() {
        let done = place.control_as(user, &["trace", "start", &second]);
        assert_eq!(done.code, 1);
        assert!(
            done.out
                .contains("trace is reserved for root and the user who runs the daemon"),
            "{}",
            done.out
        );
        assert!(!PathBuf::from(&second).exists());
    }
    // Among other commands too.
    let done = place.control_stdin(&format!("trace start {second}\ntrace stop\n"));
    assert!(
        done.out
            .ends_with(&format!(" slices, 0 lost, in {second}\n")),
        "{}",
        done.out
    );
    run.kill();
    let place = Place::new();
    let done = place.control(&["trace", "start", &second]);
    assert_eq!(
        (done.code, done.err.as_str()),
        (1, "Cannot find MPS control daemon process\n")
    );
}
