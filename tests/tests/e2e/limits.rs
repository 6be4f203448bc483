//! What clients may have: multiprocessors and device memory, as programs see them.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::{Peer, Worker};
use mpsshim_tests::programs::{Running, client, preloaded, succeed};
use mpsshim_tests::scene::{Bystander, control, daemon, daemon_with};
use mpsshim_tests::survivors::{Survivor, server};
use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

const THREADS: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
const MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
const PER_CONTEXT: &str = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING";

/// The program, which softgpu gives four multiprocessors and 4 GiB.
fn limited(place: &Place, arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = preloaded(env!("CARGO_BIN_EXE_limited"), place.pipe());
    for name in [THREADS, MEMORY, PER_CONTEXT] {
        command.env_remove(name);
    }
    command.args(arguments).envs(environment.iter().copied());
    command
}

fn number(shown: &str, name: &str) -> u64 {
    let line = shown.lines().find_map(|line| line.strip_prefix(name));
    let number = line.unwrap_or_else(|| panic!("no {name} in {shown}"));
    number.trim().parse().expect("a number")
}

#[test]
fn a_percentage_is_a_part_of_the_multiprocessors() {
    let place = daemon();
    for (percentage, count) in [
        ("", 4),
        ("100", 4),
        ("75", 3),
        ("60", 2),
        ("33.3", 1),
        ("1", 1),
        ("abc", 4),
        ("0", 4),
        ("150", 4),
    ] {
        let environment = [(THREADS, percentage)];
        let shown = succeed(&mut limited(&place, &["show"], &environment));
        assert_eq!(number(&shown, "multiprocessors "), count, "{percentage}");
        assert_eq!(
            number(&shown, "multiprocessors in a context "),
            count,
            "{percentage}"
        );
        let used = succeed(&mut limited(&place, &["where"], &environment));
        for way in ["launched ", "captured "] {
            assert_eq!(number(&used, way), count, "{percentage}: {used}");
        }
    }
}

#[test]
fn each_context_may_have_its_own_percentage() {
    let place = daemon();
    let environment = [(PER_CONTEXT, "1"), (THREADS, "50")];
    let arguments = ["contexts", "50", "25", "75", "100"];
    let used = succeed(&mut limited(&place, &arguments, &environment));
    assert_eq!(used, "50: 2 2\n25: 1 1\n75: 3 3\n100: 4 4\n");
    // Without it, the process's percentage at its start holds.
    let used = succeed(&mut limited(&place, &arguments, &[(THREADS, "50")]));
    assert_eq!(used, "50: 2 2\n25: 2 2\n75: 2 2\n100: 2 2\n");
}

#[test]
fn a_driver_that_cannot_part_a_device_gives_all_of_it_and_the_log_says_so() {
    let place = daemon_with(&[("SOFTGPU_GREEN", "0")]);
    let shown = succeed(&mut limited(&place, &["show"], &[(THREADS, "50")]));
    assert_eq!(number(&shown, "multiprocessors "), 4);
    let log = place.log("server.log");
    assert!(
        log.contains("should have 50.0 percent of the active threads"),
        "{log}"
    );
    let per_context = [(PER_CONTEXT, "1"), (THREADS, "50")];
    let used = succeed(&mut limited(&place, &["contexts", "25"], &per_context));
    assert_eq!(used, "25: 4 4\n");
}

#[test]
fn memory_is_limited_however_it_is_allocated() {
    let place = daemon();
    let environment = [(MEMORY, "0=1G")];
    let shown = succeed(&mut limited(&place, &["show"], &environment));
    assert_eq!(number(&shown, "total "), 1024);
    assert_eq!(number(&shown, "of the device "), 1024);
    assert_eq!(number(&shown, "free "), 1024);

    let pieces = succeed(&mut limited(
        &place,
        &["allocate", "67108864"],
        &environment,
    ));
    let mut ways = 0;
    for line in pieces.lines().filter(|line| line.contains(" then ")) {
        let (way, came) = line.split_once(": ").expect("a way");
        if way == "graph" && came == "0 then CUDA_ERROR_INVALID_VALUE (1)" {
            // softgpu's graphs do not allocate; a GPU's do, see tests/gpu/limits.py.
            ways += 1;
            continue;
        }
        let expected = match way {
            // What has no room on the device is host memory.
            "cuMemAllocManaged" => "24 then CUDA_SUCCESS (0)",
            _ => "16 then CUDA_ERROR_OUT_OF_MEMORY (2)",
        };
        assert_eq!(came, expected, "{line}");
        ways += 1;
    }
    assert_eq!(ways, 7, "{pieces}");
    let last = pieces.lines().last().expect("a line");
    assert!(
        last.ends_with(" of 1024") && last.starts_with("used in the end: 0 "),
        "{last}"
    );

    // Another client has all there is.
    let shown = succeed(&mut limited(&place, &["show"], &[]));
    assert_eq!(number(&shown, "total "), 4096);
}

#[test]
fn what_is_no_limit_is_an_error() {
    let place = daemon();
    let shown = succeed(&mut limited(&place, &["show"], &[(MEMORY, "0=512MB")]));
    assert_eq!(number(&shown, "total "), 512);
    for mode in ["proxy", "direct"] {
        for (value, status, why) in [
            (
                "1=1G",
                "CUDA_ERROR_INVALID_DEVICE (101)",
                "the program has no device 1",
            ),
            (
                "0=1G,7=1G",
                "CUDA_ERROR_INVALID_DEVICE (101)",
                "the program has no device 7",
            ),
            (
                "GPU-=1G",
                "CUDA_ERROR_INVALID_DEVICE (101)",
                "the program has no device GPU-",
            ),
            (
                "GPU-ffffffff=1G",
                "CUDA_ERROR_INVALID_DEVICE (101)",
                "no device GPU-ffffffff",
            ),
            (
                "0",
                "CUDA_ERROR_INVALID_VALUE (1)",
                "\"0\" is not DEVICE=AMOUNT",
            ),
            (
                "0=abc",
                "CUDA_ERROR_INVALID_VALUE (1)",
                "\"0=abc\" is not DEVICE=AMOUNT",
            ),
        ] {
            let environment = [(MEMORY, value), ("MPSSHIM_MODE", mode)];
            let running = Running::start(&mut limited(&place, &["show"], &environment));
            let pid = running.pid();
            let done = running.finish(Duration::from_secs(60));
            assert_eq!((done.code, done.out.trim()), (1, status), "{mode} {value}");
            let line = format!("mpsshim: cuInit fails with {status}: {MEMORY}={value}: ");
            assert!(
                done.err.starts_with(&line) && done.err.contains(why),
                "{}",
                done.err
            );
            let logged = format!("Client {pid} refused itself with status ");
            wait_until("it is in the log", || {
                let log = place.log("control.log");
                let mut lines = log.lines().filter(|line| line.contains(&logged));
                lines.any(|line| line.contains(why))
            });
        }
    }
    // More than there is is no mistake.
    let shown = succeed(&mut limited(&place, &["show"], &[(MEMORY, "0=99G")]));
    assert_eq!(number(&shown, "total "), 4096);
}

#[test]
fn clients_of_two_priorities_go_on_side_by_side() {
    let place = daemon();
    let normal = Bystander::start(Worker::connect(&control(&place)).expect("a session"));
    let low = [("CUDA_MPS_CLIENT_PRIORITY", "1")];
    let mut waiting = Running::start_until(client(&place, &["idle"]).envs(low), "ready");
    let mut priorities: Vec<String> = place
        .ps()
        .iter()
        .map(|row| row["priority"].clone())
        .collect();
    priorities.sort();
    assert_eq!(priorities, ["0", "1"]);
    // Below normal is not never, however busy the others are.
    succeed(client(&place, &["work", "20"]).envs(low));
    assert_eq!(
        succeed(&mut limited(&place, &["where"], &low)),
        "launched 4\ncaptured 4\nby hand 4\n"
    );
    waiting.hang_up();
    normal.stop();
    // Nor is one that comes after them hindered.
    succeed(&mut client(&place, &["work", "20"]));
}

#[test]
fn weights_let_everybody_go_on() {
    let place = daemon();
    let mut heavy = Peer::connect(&control(&place)).expect("a session");
    heavy.attach().expect("attach");
    let bystanders: Vec<Bystander> = (0..3)
        .map(|_| Bystander::start(Worker::connect(&control(&place)).expect("a session")))
        .collect();
    let server = heavy.welcome.server_pid.to_string();
    let own = std::process::id().to_string();
    // All of them are this process.
    for weight in ["1", "10000", "100"] {
        let done = place.control(&["set_client_weight", &server, &own, weight]);
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
        wait_until("all four have the weight", || {
            // One that was started and has ended may still be listed.
            let mut rows = place.ps();
            rows.retain(|row| row["pid"] == own);
            let weights: Vec<&str> = rows.iter().map(|row| row["weight"].as_str()).collect();
            weights == [weight; 4]
        });
        succeed(&mut client(&place, &["work", "20"]));
    }
    for bystander in bystanders {
        bystander.stop();
    }
}

#[test]
fn levels_are_given_unless_the_order_is_that_of_submission() {
    let place = daemon();
    let busy = || Running::start_until(&mut client(&place, &["launch"]), "busy");
    let both = [busy(), busy()];
    let uid = place.uid().to_string();
    let set = |arguments: &[&str]| {
        let done = place.control(&[&["set_scheduling"], arguments].concat());
        assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    };
    // `true`: by levels, each of which is from 1 to 3; `false`: in the order of submission.
    let served = |by_levels: bool| {
        wait_until(&format!("all are served by levels: {by_levels}"), || {
            let mut rows = place.ps();
            rows.retain(|row| both.iter().any(|one| row["pid"] == one.pid().to_string()));
            let fits = |row: &HashMap<String, String>| {
                let ranked = ["1", "2", "3"].contains(&row["level"].as_str());
                let share = row["device_share_percentage"].parse::<f64>();
                let waited = row["device_wait_ms"].parse::<f64>();
                let estimated = waited.is_ok_and(|waited| waited >= 0.0);
                match by_levels {
                    true => {
                        ranked
                            && estimated
                            && share.is_ok_and(|share| (0.0..=100.0).contains(&share))
                    }
                    false => {
                        row["level"] == "0"
                            && row["device_share_percentage"].is_empty()
                            && row["device_wait_ms"].is_empty()
                            && row["device_waited_for"].is_empty()
                    }
                }
            };
            rows.len() == 2 && rows.iter().all(fits)
        });
    };
    served(true);
    set(&["fifo"]);
    served(false);
    set(&["auto", &uid]);
    served(true);
    set(&["auto"]);
    set(&["fifo", &uid]);
    served(false);
    set(&["none", &uid]);
    served(true);
}

#[test]
fn work_that_leaves_a_part_of_the_device_free_keeps_its_order() {
    let place = daemon_with(&[("MPSSHIM_LOG", "debug")]);
    let mut long = Running::start_until(&mut client(&place, &["ordered"]), "busy");
    let short = Running::start_until(&mut client(&place, &["launch"]), "busy");
    // Whether the short kernels gain depends on the machine; that is tried again and again.
    wait_until(
        "a part was kept free, and then the whole device used",
        || {
            let log = place.log("server.log");
            let lines = log
                .lines()
                .filter(|line| line.contains("reserve for short kernels"));
            let lines: Vec<&str> = lines.collect();
            let first = lines.iter().position(|line| line.contains("extent=Some"));
            first.is_some_and(|first| lines[first..].iter().any(|line| line.contains("None")))
        },
    );
    short.kill();
    long.say("");
    let done = long.finish(PATIENCE);
    assert_eq!(done.code, 0, "{}", done.err);
}

#[test]
fn the_clients_that_had_the_device_are_told() {
    let place = daemon();
    let flood = || Running::start_until(&mut client(&place, &["flood"]), "busy");
    let both = [flood(), flood()];
    let pids = [&both[0], &both[1]].map(|one| one.pid().to_string());
    wait_until("each has waited for the other", || {
        let rows = place.ps();
        let waited = |pid: &String, other: &String| {
            let row = rows.iter().find(|row| row["pid"] == *pid)?;
            let time: f64 = row["device_wait_ms"].parse().ok()?;
            let of_other = row["device_waited_for"].strip_prefix(other)?;
            let of_other: f64 = of_other.strip_prefix(':')?.parse().ok()?;
            // There are no other clients. Both numbers are cut to microseconds.
            assert!((time - of_other).abs() < 1.0, "{row:?}");
            Some(time)
        };
        let times = [(0, 1), (1, 0)].map(|(one, other)| waited(&pids[one], &pids[other]));
        times.iter().all(|time| *time > Some(100.0))
    });
    let mut done = place.control(&["--format", "json", "ps", "-p", &pids[0]]);
    wait_until("the server has answered", || {
        if !done.err.is_empty() {
            done = place.control(&["--format", "json", "ps", "-p", &pids[0]]);
        }
        done.err.is_empty()
    });
    let rows: serde_json::Value = serde_json::from_str(&done.out).expect("JSON");
    let awaited = &rows[0]["device_waited_for"][0];
    assert_eq!(awaited["pid"].to_string(), pids[1], "{rows}");
    assert!(awaited["ms"].as_f64() > Some(100.0), "{rows}");
    // A turn lasts as long as the kernels take: in one sample a client may have waited all the time, or not at all.
    let mut partly = [false; 2];
    wait_until("each has waited for a part of the time", || {
        let top = place.control(&["top", "--once", "--interval", "1", "--json"]);
        let look: serde_json::Value = serde_json::from_str(&top.out).expect("JSON");
        let clients = look["clients"].as_array().expect("clients");
        assert_eq!(clients.len(), 2, "{look}");
        for (one, other) in [(0, 1), (1, 0)] {
            let pid = |row: &serde_json::Value| row["pid"].to_string();
            let client = clients.iter().find(|row| pid(row) == pids[one]);
            let client = client.unwrap_or_else(|| panic!("no {} in {look}", pids[one]));
            // Unknown if the server did not answer in time.
            let Some(part) = client["device_wait_percentage"].as_f64() else {
                continue;
            };
            let awaited = client["device_waits_for"].as_array().expect("clients");
            let awaited: Vec<String> = awaited.iter().map(ToString::to_string).collect();
            if part > 5.0 {
                assert_eq!(awaited, [pids[other].as_str()], "{client}");
            }
            partly[one] |= part > 5.0 && part < 95.0;
        }
        partly == [true; 2]
    });
    // The name of a client that has ended stays.
    let [first, second] = both;
    second.kill();
    wait_until("it has gone", || place.ps().len() == 1);
    let row = &place.ps()[0];
    assert!(row["device_waited_for"].starts_with(&pids[1]), "{row:?}");
    first.kill();
}

#[test]
fn a_server_that_goes_on_keeps_the_order() {
    let place = daemon();
    let uid = place.uid().to_string();
    let done = place.control(&["set_scheduling", "fifo", &uid]);
    assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    let in_order = || {
        let rows = place.ps();
        rows.len() == 2 && rows.iter().all(|row| row["level"] == "0")
    };
    survivors.iter_mut().for_each(Survivor::round);
    assert!(in_order());
    let first = server(&place).expect("a server").to_string();
    let done = place.control(&["restart_server", &first]);
    assert_eq!(done.code, 0, "{}{}", done.out, done.err);
    survivors.iter_mut().for_each(Survivor::round);
    assert!(in_order(), "in the next server, too");
    let done = place.control(&["set_scheduling", "none", &uid]);
    assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    wait_until("both have a level", || {
        survivors.iter_mut().for_each(Survivor::round);
        place.ps().iter().all(|row| row["level"] != "0")
    });
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn what_the_operator_sets_holds_for_clients_that_come_then() {
    let place = daemon();
    let control = |arguments: &[&str]| {
        let done = place.control(arguments);
        assert_eq!(
            (done.code, done.err.as_str()),
            (0, ""),
            "{arguments:?}: {}",
            done.out
        );
        done.out
    };
    control(&["set_default_active_thread_percentage", "75"]);
    control(&["set_default_device_pinned_mem_limit", "0", "3G"]);
    let running = Running::start_until(&mut client(&place, &["idle"]), "ready");
    let shown = succeed(&mut limited(&place, &["show"], &[]));
    assert_eq!(
        (number(&shown, "multiprocessors "), number(&shown, "total ")),
        (3, 3072)
    );

    let server = control(&["get_server_list"]).trim().to_owned();
    assert_eq!(
        control(&["set_active_thread_percentage", &server, "50"]),
        "50.0\n"
    );
    control(&["set_device_pinned_mem_limit", &server, "0", "1G"]);
    let shown = succeed(&mut limited(&place, &["show"], &[]));
    assert_eq!(
        (number(&shown, "multiprocessors "), number(&shown, "total ")),
        (2, 1024)
    );
    // A client's own environment only lowers.
    let more = [(THREADS, "100"), (MEMORY, "0=2G")];
    let shown = succeed(&mut limited(&place, &["show"], &more));
    assert_eq!(
        (number(&shown, "multiprocessors "), number(&shown, "total ")),
        (2, 1024)
    );
    let less = [(THREADS, "25"), (MEMORY, "0=512M")];
    let shown = succeed(&mut limited(&place, &["show"], &less));
    assert_eq!(
        (number(&shown, "multiprocessors "), number(&shown, "total ")),
        (1, 512)
    );
    // Who was there before has what it had.
    let rows = place.ps();
    assert_eq!(rows[0]["active_thread_percentage"], "75.0");
    drop(running);
}
