//! The server's side of direct mode: clients made by hand take turns of the real server on softgpu.

use mpsshim_api::cuda::{CUDA_ERROR_MPS_CONNECTION_FAILED, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED};
use mpsshim_proto::direct::{self, DIRECT, PROXY};
use mpsshim_proto::handshake::ClientHello;
use mpsshim_proto::shm;
use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::direct_peer::{DirectPeer, direct_hello};
use mpsshim_tests::peer::{Peer, greet, hello};
use mpsshim_tests::scene::{control, daemon, daemon_with, daemon_with_options};
use serde_json::Value;
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Enough that workers die in every state: their turns are shorter than the pauses between kills.
const KILLS: usize = 800;
const MOMENT: Duration = Duration::from_millis(300);

fn peer(place: &Place) -> DirectPeer {
    DirectPeer::connect(&control(place)).expect("a client in direct mode")
}

#[test]
fn a_lone_client_has_its_turn_and_is_never_asked_for_it() {
    let place = daemon();
    let one = peer(&place);
    assert_eq!(one.welcome.multiprocessors, [0; 16]);
    assert_eq!(
        (one.welcome.device_count, one.welcome.host_arena_len),
        (1, 0)
    );
    assert_eq!(one.page().turn.free.load(Ordering::Relaxed), 0);
    one.take(1);
    assert!(!one.is_asked_within(direct::WHEN_IDLE, MOMENT));
    one.give(false);
    wait_until("the turn is accounted for", || one.held_ns() > 0);
    assert_eq!(one.page().turn.turns.load(Ordering::Relaxed), 1);
    // Others that want nothing change nothing.
    let _other = peer(&place);
    one.take(1);
    assert!(!one.is_asked_within(direct::WHEN_IDLE, MOMENT));
}

#[test]
fn a_turn_is_asked_for_and_passed_on() {
    let place = daemon();
    let (one, other) = (peer(&place), peer(&place));
    one.take(1);
    other.want(1);
    assert!(one.is_asked_within(direct::NOW, PATIENCE));
    assert!(!other.is_granted_within(MOMENT), "it was not given up");
    one.become_state(direct::GIVING);
    assert!(!other.is_granted_within(MOMENT), "it drains");
    one.become_state(direct::IDLE);
    assert!(other.is_granted_within(PATIENCE));
    assert!(other.page().turn.waited_ns.load(Ordering::Relaxed) >= 600_000_000);
    assert!(one.held_ns() >= 600_000_000);
    // Nobody waits any more.
    assert_eq!(other.asked(), direct::NOT_ASKED);
}

#[test]
fn both_modes_are_served_at_once_and_an_unknown_one_is_refused() {
    let place = daemon();
    let proxied = Peer::connect(&control(&place)).expect("proxy");
    let direct = peer(&place);
    assert_eq!((proxied.welcome.mode, direct.welcome.mode), (PROXY, DIRECT));
    assert_eq!(proxied.welcome.server_pid, direct.welcome.server_pid);
    assert_ne!(proxied.welcome.session, direct.welcome.session);
    let strange = ClientHello { mode: 7, ..hello() };
    let (_, answer) = greet(&control(&place), strange.as_bytes()).expect("connect");
    let (welcome, _) = answer.expect("a refusal");
    assert_eq!(welcome.status, CUDA_ERROR_MPS_CONNECTION_FAILED.0);
    // The line comes after the answer.
    wait_until("the refusal is logged", || {
        place
            .log("server.log")
            .contains("the client requests mode 7")
    });
}

#[test]
fn both_modes_count_together() {
    let place = daemon_with(&[("MPSSHIM_MAX_CLIENTS", "2")]);
    let proxied = Peer::connect(&control(&place)).expect("proxy");
    let _direct = peer(&place);
    let (_, answer) = greet(&control(&place), direct_hello().as_bytes()).expect("connect");
    let (welcome, _) = answer.expect("a refusal");
    assert_eq!(welcome.status, CUDA_ERROR_MPS_MAX_CLIENTS_REACHED.0);
    drop(proxied);
    let until = Instant::now() + PATIENCE;
    while DirectPeer::connect(&control(&place)).is_err() {
        assert!(Instant::now() < until, "its place is free");
    }
}

#[test]
fn who_breaks_the_rules_loses_its_turn() {
    let place = daemon();
    for state in [direct::HELD, direct::GIVING, 77] {
        let (bad, other) = (peer(&place), peer(&place));
        bad.become_state(state);
        wait_until("its session is over", || {
            shm::is_hung_up(bad.socket.as_fd())
        });
        other.take(1);
    }
    // The line comes behind the end of the connection.
    wait_until("server.log says why", || {
        let log = place.log("server.log");
        log.contains("its turn's state is 77 although it wants none")
    });
}

fn succeed(place: &Place, arguments: &[&str]) -> String {
    let done = place.control(arguments);
    assert_eq!(done.code, 0, "{arguments:?}: {done:?}");
    done.out
}

/// What a command lists, once all servers have answered.
fn rows(place: &Place, command: &str) -> Vec<Value> {
    let arguments = ["--format", "json", command];
    let mut listed = None;
    wait_until("all servers have answered", || {
        let done = place.control(&arguments);
        assert_eq!(done.code, 0, "{arguments:?}: {done:?}");
        listed = done.err.is_empty().then_some(done.out);
        listed.is_some()
    });
    serde_json::from_str(&listed.expect("a list")).expect("JSON")
}

/// A daemon whose clients get direct mode, with this quantum in milliseconds.
fn direct_daemon(quantum: &str) -> Place {
    daemon_with_turns("always", quantum)
}

/// A daemon of direct mode with this policy of turns.
fn daemon_with_turns(policy: &str, quantum: &str) -> Place {
    let environment = [("MPSSHIM_TURNS", policy)];
    let place = daemon_with_options(&["-d", "--mode", "direct"], &environment);
    succeed(&place, &["set_default_quantum", quantum]);
    place
}

#[test]
fn with_turns_never_taken_all_have_the_device_at_once() {
    let place = daemon_with_turns("never", "2");
    let peers: Vec<DirectPeer> = (0..3).map(|_| peer(&place)).collect();
    for peer in &peers {
        peer.take(1);
    }
    std::thread::sleep(Duration::from_millis(50));
    for peer in &peers {
        assert_eq!(peer.asked(), direct::NOT_ASKED);
    }
}

#[test]
fn turns_are_not_taken_where_they_do_not_pay() {
    let place = daemon_with_turns("auto", "2");
    let peers: Vec<DirectPeer> = (0..2).map(|_| peer(&place)).collect();
    let ends = Instant::now() + Duration::from_secs(1);
    let both_hold = std::thread::scope(|scope| {
        let work = |peer: &DirectPeer| {
            let mut shared = Duration::ZERO;
            while Instant::now() < ends {
                peer.want(1);
                assert!(peer.is_granted_within(PATIENCE));
                // As fast beside others as alone.
                while peer.asked() != direct::NOW && Instant::now() < ends {
                    let began = Instant::now();
                    std::thread::sleep(Duration::from_micros(200));
                    peer.submit(10);
                    if peer.asked() == direct::REPORT {
                        shared += began.elapsed();
                    }
                }
                peer.give(false);
            }
            shared
        };
        let shared: Vec<_> = peers
            .iter()
            .map(|peer| scope.spawn(move || work(peer)))
            .collect();
        shared
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect::<Vec<Duration>>()
    });
    // In turns, each would be asked for its turn as soon as it has it.
    let half = Duration::from_millis(300);
    assert!(
        both_hold.iter().all(|shared| *shared > half),
        "{both_hold:?}"
    );
}

/// A client with this percentage, in hundredths; 0: all.
fn with_percentage(active_thread_centipercent: u32) -> ClientHello {
    ClientHello {
        active_thread_centipercent,
        ..direct_hello()
    }
}

/// Has these clients compete until what they held, by the page, is to each other as it should be. A machine that is
/// busy lengthens single turns: the longer they compete, the less that shows.
fn compete(place: &Place, hellos: &[ClientHello], is_fair: impl Fn(&[u64]) -> bool) {
    let connect = |hello| DirectPeer::connect_as(&control(place), hello).expect("a client");
    let peers: Vec<DirectPeer> = hellos.iter().map(connect).collect();
    let until = Instant::now() + PATIENCE;
    loop {
        std::thread::scope(|scope| {
            for peer in &peers {
                scope.spawn(|| peer.work(1, Duration::from_secs(1)));
            }
        });
        wait_until("all turns are accounted for", || {
            rows(place, "ps")
                .iter()
                .zip(&peers)
                .all(|(row, peer)| row["held_ms"].as_f64() == Some(peer.held_ns() as f64 / 1e6))
        });
        let held: Vec<u64> = peers.iter().map(DirectPeer::held_ns).collect();
        // Less says little.
        let enough = held.iter().sum::<u64>() >= 1_000_000_000;
        if enough && is_fair(&held) {
            return;
        }
        assert!(Instant::now() < until, "{held:?}");
    }
}

fn is_about(found: u64, expected: u64, percent: u64) -> bool {
    found.abs_diff(expected) * 100 <= expected * percent
}

#[test]
fn clients_have_equal_time() {
    let place = direct_daemon("2");
    for count in [2, 8] {
        compete(&place, &vec![direct_hello(); count], |held| {
            let mean = held.iter().sum::<u64>() / count as u64;
            held.iter().all(|held| is_about(*held, mean, 5))
        });
        wait_until("they have gone", || rows(&place, "ps").is_empty());
    }
}

#[test]
fn shares_are_kept() {
    let place = direct_daemon("2");
    compete(&place, &[7500, 2500].map(with_percentage), |held| {
        is_about(held[0], 3 * held[1], 5)
    });
}

#[test]
fn a_turn_is_free_at_once_when_its_holder_dies_in_whatever_state() {
    let place = direct_daemon("10");
    for state in [direct::WANTS, direct::HELD, direct::GIVING] {
        let (dying, next) = (peer(&place), peer(&place));
        let blocker = (state == direct::WANTS).then(|| {
            let blocker = peer(&place);
            blocker.take(1);
            blocker
        });
        dying.want(1);
        if state != direct::WANTS {
            assert!(dying.is_granted_within(PATIENCE));
        }
        next.want(1);
        if state == direct::GIVING {
            dying.become_state(direct::GIVING);
        }
        assert!(!next.is_granted_within(Duration::from_millis(50)));
        drop(dying);
        if let Some(blocker) = blocker {
            blocker.give(false);
        }
        assert!(next.is_granted_within(PATIENCE), "{state}");
    }
}

/// Kills clients at random moments, so that they die in every state, and looks that a bystander goes on having turns.
#[test]
fn a_client_below_normal_priority_has_a_sixteenth_of_a_share() {
    let place = direct_daemon("1");
    let hello = |priority| ClientHello {
        priority,
        ..direct_hello()
    };
    compete(&place, &[hello(0), hello(1)], |held| {
        is_about(held[0], 16 * held[1], 10)
    });
}

#[test]
fn clients_that_are_killed_hold_nobody_up() {
    kill_many_times(&direct_daemon("0.5"));
}

#[test]
fn clients_that_are_killed_hold_nobody_up_in_trials_either() {
    kill_many_times(&daemon_with_turns("auto", "0.5"));
}

fn kill_many_times(place: &Place) {
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_direct-worker"));
        command.arg(control(place)).spawn().expect("a client")
    };
    let mut workers: Vec<Child> = (0..4).map(|_| start()).collect();
    let bystander = peer(place);
    // Any sequence will do.
    let mut random = 0x2545_f491_u32;
    for turn in 0..KILLS {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        let at = random as usize % workers.len();
        std::thread::sleep(Duration::from_micros(u64::from(random >> 8) % 20_000));
        workers[at].kill().expect("kill");
        workers[at].wait().expect("wait");
        bystander.want(1);
        assert!(bystander.is_granted_within(PATIENCE), "turn {turn}");
        bystander.give(false);
        workers[at] = start();
    }
    for worker in &mut workers {
        worker.kill().expect("kill");
        worker.wait().expect("wait");
    }
    wait_until("only the bystander is left", || {
        rows(place, "ps").len() == 1
    });
    assert_eq!(
        bystander.page().turn.turns.load(Ordering::Relaxed),
        KILLS as u64
    );
}

#[test]
fn who_does_not_drain_is_named() {
    let place = direct_daemon("1");
    let (slow, other) = (peer(&place), peer(&place));
    slow.take(1);
    other.want(1);
    assert!(slow.is_asked_within(direct::NOW, PATIENCE));
    slow.become_state(direct::GIVING);
    let late = || {
        let late = |row: &Value| row["not_draining"] == true;
        rows(&place, "ps").iter().filter(|row| late(row)).count()
    };
    assert_eq!(late(), 0);
    wait_until("ps says so", || late() == 1);
    std::thread::sleep(MOMENT);
    let log = place.log("server.log");
    assert_eq!(
        log.matches("has not given it up; others wait").count(),
        1,
        "{log}"
    );
    slow.become_state(direct::IDLE);
    assert!(other.is_granted_within(PATIENCE));
    assert_eq!(late(), 0);
}

#[test]
fn the_quantum_is_set_by_server_and_by_default() {
    let place = direct_daemon("4000");
    assert_eq!(succeed(&place, &["get_default_quantum"]).trim(), "4000");
    let (one, other) = (peer(&place), peer(&place));
    let pid = one.welcome.server_pid.to_string();
    assert_eq!(succeed(&place, &["get_quantum", &pid]).trim(), "4000");
    one.take(1);
    other.want(1);
    assert!(one.is_asked_within(direct::WHEN_IDLE, PATIENCE));
    assert!(!one.is_asked_within(direct::NOW, MOMENT));
    // One that waits no longer takes that back.
    other.become_state(direct::IDLE);
    wait_until("nothing is asked for", || one.asked() == direct::NOT_ASKED);
    other.want(1);
    // It holds for a turn that is held, too.
    succeed(&place, &["set_quantum", &pid, "0.1"]);
    assert!(one.is_asked_within(direct::NOW, PATIENCE));
    assert_eq!(succeed(&place, &["get_quantum", &pid]).trim(), "0.1");
    assert_eq!(succeed(&place, &["get_default_quantum"]).trim(), "4000");
    for (arguments, why) in [
        (vec!["set_quantum", &pid, "0"], "from 0.1 to 10000"),
        (vec!["set_default_quantum", "20000"], "from 0.1 to 10000"),
        (vec!["set_quantum", "1", "10"], "Server 1 not found"),
        (vec!["set_quantum", &pid], "a process id and a number"),
    ] {
        let done = place.control(&arguments);
        assert!(
            done.code != 0 && (done.out + &done.err).contains(why),
            "{arguments:?}"
        );
    }
}

#[test]
fn limits_are_in_page_and_welcome() {
    let env = [
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G"),
        ("SOFTGPU_DEVICES", "2"),
    ];
    let place = daemon_with(&env);
    let one = peer(&place);
    let memory = |device: usize| one.page().memory[device].limit.load(Ordering::Relaxed);
    assert_eq!((memory(0), memory(1)), (1 << 30, u64::MAX));
    assert_eq!(one.welcome.memory[..2], [1 << 30, 0]);
    assert_eq!(one.welcome.device_count, 2);
}

#[test]
fn ps_and_get_client_list_show_turns() {
    let place = direct_daemon("10");
    let hello = ClientHello {
        active_thread_centipercent: 5000,
        ..direct_hello()
    };
    let one = DirectPeer::connect_as(&control(&place), &hello).expect("a client");
    one.take(1);
    one.page().memory[0].held.store(5 << 20, Ordering::Relaxed);
    let pid = one.welcome.server_pid.to_string();
    std::thread::sleep(Duration::from_millis(20));
    let row = &rows(&place, "ps")[0];
    assert_eq!((&row["mode"], &row["turns"]), (&"direct".into(), &1.into()));
    assert_eq!(row["memory"], 5 << 20);
    assert_eq!(row["active_thread_percentage"], 50.0);
    assert_eq!(row["not_draining"], false);
    assert!(row["held_ms"].as_f64().expect("a number") >= 20.0, "{row}");
    let row = &rows(&place, &format!("get_client_list {pid}"))[0];
    assert_eq!((&row["mode"], &row["turns"]), (&"direct".into(), &1.into()));
    // NVIDIA's lists are as ever, and a client in proxy mode has no turns.
    assert_eq!(
        succeed(&place, &["get_client_list", &pid]).lines().count(),
        1
    );
    let hello = ClientHello {
        mode: PROXY,
        ..mpsshim_tests::peer::hello()
    };
    let (_proxied, answer) = greet(&control(&place), hello.as_bytes()).expect("connect");
    assert_eq!(answer.expect("a welcome").0.status, 0);
    let row = &rows(&place, "ps")[1];
    assert_eq!(
        (&row["mode"], &row["turns"]),
        (&"proxy".into(), &Value::Null)
    );
}

#[test]
fn contexts_are_made_for_the_first_client_in_proxy_mode() {
    let place = direct_daemon("10");
    let (_one, answer) = greet(&control(&place), hello().as_bytes()).expect("connect");
    assert_eq!(answer.expect("a welcome").0.mode, DIRECT);
    assert!(!place.log("server.log").contains("Creating server context"));
    let hello = ClientHello {
        mode: PROXY,
        ..hello()
    };
    let (_other, answer) = greet(&control(&place), hello.as_bytes()).expect("connect");
    assert_eq!(answer.expect("a welcome").0.mode, PROXY);
    assert!(place.log("server.log").contains("Creating server context"));
}

#[test]
fn the_mode_of_the_environment_is_the_daemon_s_own() {
    let place = daemon_with(&[("MPSSHIM_MODE", "direct")]);
    let (_one, answer) = greet(&control(&place), hello().as_bytes()).expect("connect");
    assert_eq!(answer.expect("a welcome").0.mode, DIRECT);
    let done = Place::new().control(&["-d", "--mode", "both"]);
    assert!(
        done.code != 0 && done.err.contains("proxy, direct"),
        "{done:?}"
    );
    let done = place.control(&["--mode", "direct", "ps"]);
    assert_eq!(
        (done.code, done.err.contains("--mode is a daemon option")),
        (2, true)
    );
}

/// The mode of a client that asks for none and has this `CUDA_VISIBLE_DEVICES`.
fn mode_of(place: &Place, visible: Option<&str>) -> u32 {
    let hello = hello().with_visible(visible.map(str::as_bytes));
    let (_client, answer) = greet(&control(place), hello.as_bytes()).expect("connect");
    answer.expect("a welcome").0.mode
}

const TWO_DEVICES: (&str, &str) = ("SOFTGPU_DEVICES", "2");

#[test]
fn a_device_that_a_client_sees_decides_its_mode() {
    let place = daemon_with_options(&["-d", "--mode", "proxy,1=direct"], &[TWO_DEVICES]);
    for (visible, mode) in [
        (Some("0"), PROXY),
        (Some("1"), DIRECT),
        (Some("0,1"), DIRECT),
        (None, DIRECT),
        (Some(""), PROXY),
        // Too long to be sent.
        (Some("0,".repeat(400).as_str()), DIRECT),
    ] {
        assert_eq!(mode_of(&place, visible), mode, "{visible:?}");
    }
    let uuid = |ordinal: usize| rows(&place, "device_query")[ordinal]["uuid"].clone();
    let [first, second] = [uuid(0), uuid(1)].map(|uuid| uuid.as_str().expect("text").to_owned());
    assert_eq!(mode_of(&place, Some(&first)), PROXY);
    assert_eq!(mode_of(&place, Some(&second)), DIRECT);
    // Who asks for a mode gets it.
    let asks = ClientHello {
        mode: PROXY,
        ..hello()
    };
    let (_client, answer) = greet(&control(&place), asks.as_bytes()).expect("connect");
    assert_eq!(answer.expect("a welcome").0.mode, PROXY);
    // By UUID, and the other way round; the first device is the direct one, so that nothing has a context.
    let modes = format!("proxy,{first}=direct");
    let place = daemon_with_options(&["-d", "--mode", &modes], &[TWO_DEVICES]);
    assert_eq!(mode_of(&place, Some("0")), DIRECT);
    assert!(!place.log("server.log").contains("Creating server context"));
    assert_eq!(mode_of(&place, Some("1")), PROXY);
}

#[test]
fn the_machine_s_ordinals_are_not_the_server_s() {
    let place = daemon_with(&[
        TWO_DEVICES,
        ("CUDA_VISIBLE_DEVICES", "1,0"),
        ("MPSSHIM_MODE", "0=direct"),
    ]);
    assert_eq!(mode_of(&place, Some("1")), DIRECT);
    assert_eq!(mode_of(&place, Some("0")), PROXY);
}

#[test]
fn modes_that_mean_nothing_are_refused_by_the_daemon() {
    let server = mpsshim_tests::artifacts::artifact("mps-server");
    let driver = mpsshim_tests::artifacts::driver();
    for (modes, why) in [
        (
            "1=both",
            "\"1=both\" is neither a mode (proxy, direct) nor DEVICE=MODE",
        ),
        ("direct,direct", "two modes for all devices"),
        ("0=direct,0=proxy", "two modes for device 0"),
        ("7=direct", "Device 7 not found"),
        ("GPU-5=direct", "Device GPU-5 is ambiguous"),
    ] {
        let place = Place::new();
        let mut command = place.command("mps-control");
        command
            .args(["-d", "--mode", modes])
            .env("MPSSHIM_SERVER", &server);
        command
            .env("MPSSHIM_CUDA_LIBRARY", &driver)
            .env("SOFTGPU_DEVICES", "2");
        let done = command.output().expect("run");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(
            !done.status.success() && said.contains(why),
            "{modes}: {said}"
        );
    }
}

#[test]
fn a_client_is_terminated() {
    let place = direct_daemon("10");
    let one = peer(&place);
    one.take(1);
    let [server, client] = [one.welcome.server_pid, std::process::id()].map(|pid| pid.to_string());
    assert_eq!(
        succeed(&place, &["terminate_client", &server, &client]).trim(),
        "0"
    );
    assert!(shm::is_hung_up(one.socket.as_fd()));
    peer(&place).take(1);
    assert!(
        place
            .log("server.log")
            .contains("terminated by the operator")
    );
}
