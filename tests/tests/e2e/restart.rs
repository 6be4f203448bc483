//! Servers that are replaced while their clients go on, and standbys.

use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::{Object, Op, StreamCreate};
use mpsshim_tests::artifacts::artifact;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::{PTX, Peer, Worker, memory_file, new_ptx};
use mpsshim_tests::programs::{Running, client, preloaded, succeed};
use mpsshim_tests::scene::{Bystander, control, daemon, daemon_with, daemon_with_descriptors};
use mpsshim_tests::survivors::{
    RPC_FAILURE, Survivor, clients, keepers, kill_server, portable, server, wait_until_portable,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The outcome of `restart_server` with these options: the new server, and what is said of the clients that stay.
fn restart_or_stay(place: &Place, options: &[&str]) -> Result<(i32, Option<String>), String> {
    let pid = server(place).expect("a server").to_string();
    let done = place.control(&[&["restart_server", &pid], options].concat());
    let text = done.out.trim();
    if done.code != 0 {
        return Err(text.to_owned());
    }
    let (new, stay) = match text.split_once('\n') {
        Some((new, stay)) => (new, Some(stay.to_owned())),
        None => (text, None),
    };
    Ok((new.parse().expect("a process id"), stay))
}

/// As [`restart_or_stay`], if no client stays.
pub fn restart(place: &Place, options: &[&str]) -> Result<i32, String> {
    match restart_or_stay(place, options)? {
        (new, None) => Ok(new),
        (_, Some(stay)) => Err(stay),
    }
}

pub fn servers(place: &Place) -> usize {
    place.control(&["get_server_list"]).out.lines().count()
}

#[test]
fn clients_go_on_in_the_next_server_without_an_error() {
    let place = daemon();
    let mut survivors: Vec<Survivor> = (0..3).map(|_| Survivor::start(&place)).collect();
    survivors.iter_mut().for_each(Survivor::round);
    let before = clients(&place);
    for _ in 0..5 {
        let old = server(&place).expect("a server");
        let new = restart(&place, &[]).expect("a restart");
        assert_ne!(new, old);
        wait_until("the server before has ended", || servers(&place) == 1);
        assert_eq!(server(&place), Some(new));
        survivors.iter_mut().for_each(Survivor::round);
        assert_eq!(clients(&place), before, "the same clients and contexts");
    }
    assert_eq!(keepers(&place), 1);
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    let log = place.log("server.log");
    let again = "Sessions of the server before: 3 go on, 0 have ended";
    assert_eq!(log.matches(again).count(), 5, "{log}");
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn clients_that_never_rest_by_themselves_go_on_too() {
    let place = daemon();
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for survivor in &mut survivors {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    survivor.round();
                }
            });
        }
        let outcomes: Vec<_> = (0..10).map(|_| restart(&place, &["-t", "600"])).collect();
        over.store(true, Ordering::Relaxed);
        for outcome in outcomes {
            assert!(outcome.is_ok(), "{outcome:?}");
        }
    });
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn clients_that_allocate_all_the_time_keep_their_memory() {
    let place = daemon();
    let bystanders: Vec<Bystander> = (0..6)
        .map(|_| Bystander::start(Worker::connect(&control(&place)).expect("a session")))
        .collect();
    let done = place.control(&["set_scheduling", "fifo"]);
    assert_eq!((done.code, done.out.as_str()), (0, ""), "{}", done.err);
    for _ in 0..10 {
        restart(&place, &["-t", "600"]).expect("a restart");
        bystanders.iter().for_each(Bystander::goes_on);
    }
    let log = place.log("server.log");
    let again = "Sessions of the server before: 6 go on, 0 have ended";
    assert_eq!(log.matches(again).count(), 10, "{log}");
    let rows = place.ps();
    let in_order = rows.iter().all(|row| row["level"] == "0");
    assert!(rows.len() == 6 && in_order, "{rows:?}");
    for bystander in bystanders {
        bystander.stop();
    }
}

#[test]
fn clients_that_come_meanwhile_wait_for_the_next_server() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let newcomers = scope.spawn(|| {
            let mut count = 0;
            while !over.load(Ordering::Relaxed) {
                assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
                count += 1;
            }
            count
        });
        // They are bound, by what they make: those that are there are waited for, as long as it takes.
        let mut done = 0;
        while done < 3 {
            wait_until("the servers of those that stayed have ended", || {
                servers(&place) == 1
            });
            match restart(&place, &["-t", "600"]) {
                Ok(_) => done += 1,
                Err(why) => assert!(why.contains("is bound by"), "{why}"),
            }
        }
        over.store(true, Ordering::Relaxed);
        assert!(newcomers.join().expect("newcomers") > 0);
    });
    survivor.round();
    survivor.end();
}

#[test]
fn clients_that_cannot_go_on_keep_the_old_server_until_they_end() {
    let place = daemon();
    let [mut idle, mut bound] = [(); 2].map(|()| Survivor::start(&place));
    assert_eq!(bound.ask("graph"), "graph");
    let old = server(&place).expect("a server");
    let (new, stay) = restart_or_stay(&place, &["-t", "1"]).expect("a restart");
    let expected = format!(
        "Server {old} keeps these clients until they end: client {} is bound by graphs",
        bound.program.pid()
    );
    assert_eq!(stay, Some(expected));
    let of_server = |server: i32| {
        let listed = place.control(&["get_client_list", &server.to_string()]);
        listed.out.lines().count()
    };
    assert_eq!((of_server(old), of_server(new)), (1, 1));
    for _ in 0..3 {
        idle.round();
        bound.round();
    }
    // The next client has the new server, which can be replaced in turn.
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    let newest = {
        let done = place.control(&["restart_server", &new.to_string()]);
        assert_eq!(done.code, 0, "{}", done.out);
        done.out.trim().parse::<i32>().expect("a process id")
    };
    idle.round();
    bound.round();
    assert_eq!((of_server(old), of_server(newest)), (1, 1));
    bound.end();
    wait_until("the old server has ended", || servers(&place) == 1);
    assert_eq!(server(&place), Some(newest));
    wait_until("its keeper too", || keepers(&place) == 1);
    idle.round();
    kill_server(&place);
    idle.round();
    idle.end();
}

#[test]
fn clients_that_have_stayed_outlive_their_server_once_they_can() {
    let place = daemon();
    let [mut idle, mut bound] = [(); 2].map(|()| Survivor::start(&place));
    assert_eq!(bound.ask("unload"), "unload");
    let mut old = server(&place).expect("a server");
    let (new, stay) = restart_or_stay(&place, &["-t", "1"]).expect("a restart");
    assert!(stay.is_some(), "one client stays");
    let answer = bound.ask("destroy");
    assert!(answer.starts_with("destroyed, "), "{answer}");
    for _ in 0..2 {
        wait_until_portable(&place, 2);
        kill(Pid::from_raw(old), Signal::SIGKILL).expect("killed");
        bound.round();
        idle.round();
        let list = place.control(&["get_server_list"]).out;
        let others = list.lines().filter_map(|line| line.parse().ok());
        let others: Vec<i32> = others.filter(|pid| *pid != new).collect();
        assert!(others.len() == 1 && others[0] != old, "{list}");
        old = others[0];
    }
    // Its server is not for others, and ends with it.
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    bound.end();
    wait_until("its server has ended", || servers(&place) == 1);
    assert_eq!(server(&place), Some(new));
    idle.round();
    idle.end();
}

/// Three clients, the servers before and after a restart, and the last two clients have stayed: they are bound by graphs.
fn with_two_that_stay(place: &Place) -> ([Survivor; 3], i32, i32) {
    let mut all = [(); 3].map(|()| Survivor::start(place));
    for bound in &mut all[1..] {
        assert_eq!(bound.ask("unload"), "unload");
    }
    let old = server(place).expect("a server");
    let (new, stay) = restart_or_stay(place, &["-t", "1"]).expect("a restart");
    assert!(stay.is_some(), "two clients stay");
    (all, old, new)
}

#[test]
fn graphs_and_streams_wait_for_their_functions_beside_a_client_that_stays() {
    let place = daemon();
    let [mut idle, mut bound] = [(); 2].map(|()| Survivor::start(&place));
    assert_eq!(idle.ask("host"), "hosted 1");
    assert_eq!(bound.ask("unload"), "unload");
    let (_, stay) = restart_or_stay(&place, &["-t", "1"]).expect("a restart");
    assert!(stay.is_some(), "one client stays");
    for round in 2..5 {
        assert_eq!(idle.ask("host"), format!("hosted {round}"));
    }
    bound.round();
    bound.end();
    idle.end();
}

#[test]
fn clients_that_have_stayed_move_by_themselves_once_all_of_them_can() {
    let place = daemon_with(&[("MPSSHIM_MOVE_LATER", "1")]);
    let ([mut idle, mut first, mut second], old, new) = with_two_that_stay(&place);
    for bound in [&mut first, &mut second] {
        let log = place.log("control.log");
        assert!(!log.contains("can move now"), "{log}");
        let answer = bound.ask("destroy");
        assert!(answer.starts_with("destroyed, "), "{answer}");
        bound.round();
    }
    wait_until("the old server has ended", || {
        let list = place.control(&["get_server_list"]).out;
        list.lines().all(|line| line.parse() != Ok(old))
    });
    for survivor in [&mut idle, &mut first, &mut second] {
        survivor.round();
    }
    let log = place.log("control.log");
    let told = format!("Server {old}: the clients that an earlier restart left can move now");
    assert!(log.contains(&told), "{log}");
    // Their server is not for others, and ends with them.
    assert_eq!(servers(&place), 2);
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    first.end();
    second.end();
    wait_until("their server has ended", || servers(&place) == 1);
    assert_eq!(server(&place), Some(new));
    idle.end();
}

#[test]
fn clients_that_have_stayed_leave_their_server_once_they_can() {
    let place = daemon();
    let ([mut idle, mut first, mut second], old, new) = with_two_that_stay(&place);
    let restart_old = |old: i32| {
        let done = place.control(&["restart_server", &old.to_string()]);
        let mut lines = done.out.lines().map(str::to_owned);
        let next: i32 = lines.next().expect("a line").parse().expect("a server");
        (next, lines.next())
    };
    let can_move = |client: &mut Survivor, count: usize| {
        let answer = client.ask("destroy");
        assert!(answer.starts_with("destroyed, "), "{answer}");
        wait_until("it is portable", || {
            portable(&place).values().filter(|is| **is).count() == count
        });
    };
    // None of them can leave.
    let done = place.control(&["restart_server", &old.to_string()]);
    assert_ne!(done.code, 0, "{}", done.out);
    let why = format!("the clients of server {old} stay: ");
    assert!(
        done.out.contains(&why) && done.out.contains("is bound by graphs"),
        "{}",
        done.out
    );
    assert_eq!(servers(&place), 2);
    // One of them leaves, the other stays once more.
    can_move(&mut first, 2);
    let (next, stay) = restart_old(old);
    assert!(next != new && next != old && stay.is_some(), "{stay:?}");
    first.round();
    can_move(&mut second, 3);
    let (last, stay) = restart_old(old);
    assert!(last != next && stay.is_none(), "{stay:?}");
    wait_until("the old server has ended", || {
        let list = place.control(&["get_server_list"]).out;
        list.lines().all(|line| line.parse() != Ok(old))
    });
    for survivor in [&mut idle, &mut first, &mut second] {
        survivor.round();
    }
    // New clients do not go there, and these servers end with their clients.
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    first.end();
    second.end();
    wait_until("their servers have ended", || servers(&place) == 1);
    assert_eq!(server(&place), Some(new));
    idle.round();
    idle.end();
}

#[test]
fn loops_in_graphs_go_to_the_next_server() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    for round in 1..=6 {
        assert_eq!(survivor.ask("loop"), format!("looped {round}"));
        assert_eq!(survivor.ask("replay"), format!("replayed {round}"));
        let old = server(&place).expect("a server");
        let new = restart(&place, &["-t", "600"]).expect("a restart");
        assert_ne!(new, old);
    }
    assert_eq!(survivor.ask("loop"), "looped 7");
    survivor.round();
    survivor.end();
}

/// Two clients whose requests are answered with their number go to the next server five times.
fn go_to_the_next_server(request: &str, answer: &str) {
    let place = daemon();
    let mut survivors: Vec<Survivor> = (0..2).map(|_| Survivor::start(&place)).collect();
    for round in 1..=5 {
        for survivor in &mut survivors {
            assert_eq!(survivor.ask(request), format!("{answer} {round}"));
        }
        restart(&place, &["-t", "600"]).expect("a restart");
    }
    for survivor in &mut survivors {
        assert_eq!(survivor.ask(request), format!("{answer} 6"));
        survivor.round();
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn pools_go_to_the_next_server() {
    go_to_the_next_server("pool", "pooled");
}

#[test]
fn registered_memory_goes_to_the_next_server() {
    go_to_the_next_server("register", "registered");
}

#[test]
fn handles_of_memory_that_is_mapped_nowhere_go_to_the_next_server() {
    go_to_the_next_server("hold", "held");
}

#[test]
fn arrays_and_textures_go_to_the_next_server() {
    go_to_the_next_server("texture", "textured");
}

#[test]
fn green_contexts_and_their_resources_go_to_the_next_server() {
    go_to_the_next_server("part", "parted");
}

#[test]
fn variables_that_are_saved_in_files_go_to_the_next_server() {
    go_to_the_next_server("table", "tabled");
}

#[test]
fn programs_that_share_memory_stay_together() {
    let place = daemon();
    let [mut owner, mut other, mut third] = [(); 3].map(|()| Survivor::start(&place));
    let handle = owner.ask("give");
    assert_eq!(other.ask(&format!("open {handle}")), "opened");
    assert_eq!(owner.ask("write 5"), "written");
    assert_eq!(owner.ask("graph"), "graph");
    let old = server(&place).expect("a server");
    let done = place.control(&["restart_server", &old.to_string()]);
    assert_eq!(done.code, 0, "{}", done.out);
    for why in [
        "is bound by graphs",
        "shares memory with a client that stays",
    ] {
        assert!(done.out.contains(why), "{}", done.out);
    }
    assert_eq!(other.ask("read"), "5");
    for survivor in [&mut owner, &mut other, &mut third] {
        survivor.round();
    }
}

#[test]
fn sessions_that_part_again_and_again_keep_all_they_have() {
    let place = daemon();
    let mut moving: Vec<Survivor> = (0..3).map(|_| Survivor::start(&place)).collect();
    let mut staying: Vec<Survivor> = Vec::new();
    for part in 1..=4 {
        for survivor in &mut moving {
            assert_eq!(survivor.ask("pool"), format!("pooled {part}"));
            assert_eq!(survivor.ask("register"), format!("registered {part}"));
            assert_eq!(survivor.ask("texture"), format!("textured {part}"));
        }
        let mut bound = Survivor::start(&place);
        assert_eq!(bound.ask("graph"), "graph");
        let list = place.control(&["get_server_list"]).out;
        let old = list.lines().last().expect("a server").to_owned();
        let done = place.control(&["restart_server", &old]);
        assert_eq!(done.code, 0, "{}", done.out);
        assert!(done.out.contains("is bound by graphs"), "{}", done.out);
        staying.push(bound);
        moving
            .iter_mut()
            .chain(&mut staying)
            .for_each(Survivor::round);
    }
    assert_eq!(servers(&place), 5);
    // The servers of those that stay are not for new clients.
    let list = place.control(&["get_server_list"]).out;
    let last: i32 = list
        .lines()
        .last()
        .expect("a server")
        .parse()
        .expect("a process id");
    let mut moved = moving.pop().expect("a client");
    moving.into_iter().for_each(Survivor::end);
    moved.round();
    moved.end();
    wait_until("the last server is idle", || {
        place
            .control(&["get_client_list", &last.to_string()])
            .out
            .is_empty()
    });
    kill(Pid::from_raw(last), Signal::SIGKILL).expect("killed");
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    staying.iter_mut().for_each(Survivor::round);
    staying.into_iter().for_each(Survivor::end);
    wait_until("one server is left", || servers(&place) == 1);
}

#[test]
fn both_servers_have_the_images_of_their_clients_after_a_parting() {
    let place = daemon();
    let [mut idle, mut bound] = [(); 2].map(|()| Survivor::start(&place));
    assert_eq!(bound.ask("graph"), "graph");
    for survivor in [&mut idle, &mut bound] {
        assert_eq!(survivor.ask("library"), "library");
    }
    let (_, stay) = restart_or_stay(&place, &[]).expect("a restart");
    assert!(stay.is_some_and(|stay| stay.contains("is bound by graphs")));
    // The driver gets the content that each server has.
    for survivor in [&mut idle, &mut bound] {
        assert_eq!(survivor.ask("module"), "module");
    }
    kill_server(&place);
    for mut survivor in [idle, bound] {
        survivor.round();
        survivor.end();
    }
}

#[test]
fn with_force_clients_that_cannot_go_on_are_ended() {
    let place = daemon();
    let [mut idle, mut bound] = [(); 2].map(|()| Survivor::start(&place));
    assert_eq!(bound.ask("graph"), "graph");
    let old = server(&place).expect("a server");
    let new = restart(&place, &["-f"]).expect("a restart by force");
    assert_ne!(new, old);
    assert_eq!(bound.ask("round"), RPC_FAILURE);
    idle.round();
    idle.end();
}

#[test]
fn work_that_lasts_is_not_waited_for_if_the_command_says_so() {
    let place = daemon();
    let [mut idle, mut busy] = [(); 2].map(|()| Survivor::start(&place));
    // Longer than any patience.
    assert_eq!(busy.ask("launch 1000000"), "launched");
    let stay = restart(&place, &["-t", "0"]).expect_err("a kernel runs");
    assert!(stay.ends_with("has not come to rest within 0 s"), "{stay}");
    idle.round();
    let busy_server = place.control(&["get_server_list"]).out;
    let busy_server = busy_server.lines().next().expect("a server").to_owned();
    // It still serves its client, and can be replaced by force.
    let again = place.control(&["restart_server", &busy_server, "-t", "0", "-f"]);
    assert_eq!(again.code, 0, "{}", again.out);
    assert_eq!(busy.ask("round"), RPC_FAILURE);
    wait_until("its servers have ended", || servers(&place) == 1);
    restart(&place, &["-t", "0", "-f"]).expect("a restart by force");
    idle.round();
    idle.end();
}

/// A restart that waits for work without end: `act` has it called off, and its clients go on.
fn called_off(act: impl FnOnce(&Place, &str)) {
    let place = daemon();
    let [mut idle, mut busy] = [(); 2].map(|()| Survivor::start(&place));
    assert_eq!(busy.ask("launch 1000000"), "launched");
    let old = server(&place).expect("a server").to_string();
    std::thread::scope(|scope| {
        let restarted = scope.spawn(|| restart(&place, &["-t", "600"]));
        wait_until("the sessions are being brought to rest", || {
            let log = place.log("server.log");
            log.contains("Server has been notified to hand over its clients")
        });
        act(&place, &old);
        wait_until("it is called off", || {
            place
                .log("server.log")
                .contains("The clients stay: it was called off")
        });
        assert!(restarted.join().expect("the command").is_err());
        idle.round();
    });
    busy.program.kill();
    idle.end();
}

#[test]
fn a_server_that_is_told_to_end_meanwhile_waits_for_its_clients() {
    called_off(|place, server| {
        // It would wait for their end.
        let mut command = place.command("mps-control");
        command.args(["shutdown_server", server]);
        let mut waiting = command.spawn().expect("mps-control");
        wait_until("it is told", || {
            place
                .log("control.log")
                .contains("Try shutting down server")
        });
        let _ = waiting.kill();
        let _ = waiting.wait();
    });
}

#[test]
fn a_daemon_that_dies_meanwhile_takes_no_client_with_it() {
    called_off(|place, _| place.signal_daemon(nix::sys::signal::Signal::SIGKILL));
}

/// The server's executable, as an upgrade replaces it.
pub struct Installed {
    _folder: TempDir,
    pub path: PathBuf,
}

impl Installed {
    pub fn new() -> Installed {
        Installed::of(&artifact("mps-server"))
    }

    /// This executable, in the folder `bin` of a folder of its own.
    pub fn of(server: &Path) -> Installed {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("bin/mps-server");
        fs::create_dir(folder.path().join("bin")).expect("a folder");
        fs::copy(server, &path).expect("a copy");
        Installed {
            _folder: folder,
            path,
        }
    }

    /// The server of an earlier release, as its package leaves it there.
    pub fn leave_earlier(&self, release: &str, server: &Path) {
        let folder = self.path.with_file_name("../lib/mpsshim/earlier");
        let folder = folder.join(release);
        fs::create_dir_all(&folder).expect("folders");
        fs::copy(server, folder.join("mps-server")).expect("a copy");
    }

    /// A daemon that uses it.
    pub fn daemon(&self, env: &[(&str, &str)]) -> Place {
        let path = self.path.to_str().expect("UTF-8");
        daemon_with(&[env, &[("MPSSHIM_SERVER", path)]].concat())
    }

    /// Another executable takes its place: running servers go on.
    pub fn replace_with(&self, server: &Path) {
        let next = self.path.with_extension("next");
        fs::copy(server, &next).expect("a copy");
        fs::rename(&next, &self.path).expect("renamed");
    }

    /// A script takes its place: what runs goes on.
    pub fn replace(&self, script: &str) {
        let next = self.path.with_extension("next");
        fs::write(&next, format!("#!/bin/sh\n{script}\n")).expect("written");
        fs::set_permissions(&next, fs::Permissions::from_mode(0o755)).expect("permissions");
        fs::rename(&next, &self.path).expect("renamed");
    }
}

#[test]
fn a_server_that_does_not_start_replaces_nobody() {
    let installed = Installed::new();
    let place = installed.daemon(&[]);
    let mut survivor = Survivor::start(&place);
    let old = server(&place).expect("a server");
    installed.replace("exit 1");
    let why = restart(&place, &[]).expect_err("it ends at once");
    assert_eq!(why, "the next server has ended; server.log says why");
    survivor.round();
    assert_eq!(server(&place), Some(old));
    survivor.end();
}

#[test]
fn a_server_that_hangs_as_it_starts_is_waited_for_as_long_as_the_command_says() {
    for env in [&[][..], &[("MPSSHIM_STANDBY", "1")]] {
        let installed = Installed::new();
        let place = installed.daemon(env);
        let mut survivor = Survivor::start(&place);
        if !env.is_empty() {
            wait_for_standby(&place, 1);
            // The next one hangs.
            installed.replace("exec sleep 600");
            kill(standby(&place), Signal::SIGKILL).expect("killed");
            wait_until("another is started", || standbys(&place).len() == 2);
        }
        installed.replace("exec sleep 600");
        let old = server(&place).expect("a server");
        let began = Instant::now();
        let why = restart(&place, &["-t", "1"]).expect_err("it hangs");
        assert_eq!(why, "the next server does not start");
        // The bound without the option is a minute.
        assert!(began.elapsed() < Duration::from_secs(30), "{began:?}");
        let hung = standbys(&place)[env.len()];
        wait_until("it is ended", || kill(hung, None).is_err());
        survivor.round();
        assert_eq!(server(&place), Some(old));
        survivor.end();
    }
}

#[test]
fn a_server_without_clients_and_one_that_does_not_exist() {
    let place = daemon();
    let done = place.control(&["restart_server", "4194305"]);
    assert_ne!(done.code, 0);
    assert_eq!(done.out.trim(), "Server 4194305 not found");
    let worker = Worker::connect(&control(&place)).expect("a client");
    drop(worker);
    wait_until("it has gone", || clients(&place).is_empty());
    let old = server(&place).expect("a server");
    let new = restart(&place, &[]).expect("a restart");
    assert_ne!(new, old);
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    assert_eq!(server(&place), Some(new));
}

#[test]
fn clients_in_direct_mode_stay() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    let mut command = preloaded(env!("CARGO_BIN_EXE_survivor"), place.pipe());
    let mut direct = Running::start_until(command.env("MPSSHIM_MODE", "direct"), "started");
    let why = restart(&place, &[]).expect_err("it has its own context");
    assert!(why.ends_with("stay: 1 clients are in direct mode"), "{why}");
    survivor.round();
    direct.say("round");
    assert!(direct.line().starts_with("ok 2 "));
    survivor.end();
}

#[test]
fn a_standby_goes_on_when_the_server_is_killed() {
    let place = daemon_with(&[("MPSSHIM_STANDBY", "1")]);
    let mut survivor = Survivor::start(&place);
    // Behind it nothing is in flight.
    survivor.round();
    for round in 1..=5 {
        wait_for_standby(&place, round);
        assert_eq!(servers(&place), 1, "a standby is no server");
        kill_server(&place);
        survivor.round();
    }
    let log = place.log("control.log");
    assert_eq!(
        log.matches("goes on with the clients of server").count(),
        5,
        "{log}"
    );
    survivor.end();
}

/// The standbys that the daemon has started, oldest first.
pub fn standbys(place: &Place) -> Vec<Pid> {
    let log = place.log("control.log");
    let started = log.split("Starting standby ").skip(1);
    let pid = |text: &str| text.split_once(' ')?.0.parse().ok();
    started
        .map(|text| Pid::from_raw(pid(text).expect("a process id")))
        .collect()
}

fn standby(place: &Place) -> Pid {
    *standbys(place).last().expect("a standby")
}

/// Waits until this many standbys have become ready.
fn wait_for_standby(place: &Place, count: usize) {
    wait_until("a standby is ready", || {
        place.log("control.log").matches(" stands by").count() == count
    });
}

#[test]
fn a_standby_that_ends_is_replaced() {
    let place = daemon_with(&[("MPSSHIM_STANDBY", "1")]);
    let mut survivor = Survivor::start(&place);
    survivor.round();
    for count in 1..=2 {
        wait_for_standby(&place, count);
        kill(standby(&place), Signal::SIGKILL).expect("killed");
    }
    wait_for_standby(&place, 3);
    kill_server(&place);
    survivor.round();
    assert_eq!(server(&place), Some(standbys(&place)[2].as_raw()));
    survivor.end();
}

#[test]
fn a_standby_that_is_stopped_keeps_nobody_waiting() {
    let place = daemon_with(&[("MPSSHIM_STANDBY", "1")]);
    let mut survivor = Survivor::start(&place);
    survivor.round();
    wait_for_standby(&place, 1);
    let stopped = standby(&place);
    kill(stopped, Signal::SIGSTOP).expect("stopped");
    kill_server(&place);
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
    survivor.round();
    assert!(kill(stopped, None).is_err(), "it is there");
    survivor.end();
}

#[test]
fn a_server_that_does_not_go_on_with_the_clients_keeps_no_command_waiting() {
    let installed = Installed::new();
    let genuine = artifact("mps-server");
    let stops = installed.path.with_extension("stops");
    let script = format!(
        "test -e {} && kill -STOP $$; exec {} \"$@\"",
        stops.display(),
        genuine.display()
    );
    installed.replace(&script);
    let place = installed.daemon(&[("MPSSHIM_STANDBY", "1")]);
    let mut survivor = Survivor::start(&place);
    survivor.round();
    wait_for_standby(&place, 1);
    let old = server(&place).expect("a server");
    // The standby does not take the sessions over; the server that is started then stops, too.
    let stopped = standby(&place);
    kill(stopped, Signal::SIGSTOP).expect("stopped");
    fs::write(&stops, "").expect("written");
    let why = restart(&place, &["-t", "0"]).expect_err("it is stopped");
    let next = server(&place).expect("the next server");
    assert!(next != old && next != stopped.as_raw());
    let expected = format!(
        "server {next} is still restoring the clients of server {old} after 30 s; server.log says how far it is"
    );
    assert_eq!(why, expected);
    kill(Pid::from_raw(next), Signal::SIGCONT).expect("continued");
    survivor.round();
    assert_eq!(server(&place), Some(next));
    survivor.end();
}

#[test]
fn a_stream_whose_legacy_stream_is_destroyed_goes_on() {
    let place = daemon();
    let mut worker = Worker::connect(&control(&place)).expect("a session");
    worker.round().expect("a round");
    let peer = &mut worker.peer;
    let (legacy, stream) = (peer.handle(Kind::Stream), peer.handle(Kind::Stream));
    for made in [legacy, stream] {
        let body = StreamCreate {
            stream: made,
            legacy,
            ..StreamCreate::default()
        };
        peer.post(Op::StreamCreate, &body, &[]).expect("posted");
    }
    let destroyed = Object { object: legacy };
    peer.post(Op::StreamDestroy, &destroyed, &[])
        .expect("posted");
    assert_eq!(peer.finish(stream), Ok(()));
    worker.stream = stream;
    worker.round().expect("a round in the stream that is left");
    restart(&place, &[]).expect("a restart");
    worker.round().expect("a round in the next server");
}

/// A library of this text.
fn library(peer: &mut Peer, text: &str, token: u64) -> u64 {
    let mut body = peer.image_load(text.as_bytes());
    body.image = peer.handle(Kind::Library);
    if token == 0 {
        let loaded = peer.ask_as(0, Op::ImageLoad, &body, &[]);
        loaded.expect("the server has its content");
        return body.image;
    }
    let file = memory_file(text.as_bytes()).expect("a file");
    peer.load(&body, &[], file.as_fd()).expect("a library")
}

#[test]
fn images_of_clients_that_part_go_on_in_both_servers() {
    let place = daemon();
    let peer = || {
        let mut peer = Peer::connect(&control(&place)).expect("a session");
        peer.attach().expect("attach");
        peer
    };
    let (mut stays, mut leaves) = (peer(), peer());
    stays.bind().expect("a pool");
    let texts = [new_ptx(), new_ptx()];
    library(&mut stays, &texts[0], 1);
    let before = library(&mut leaves, &texts[1], 1);
    let (_, stay) = restart_or_stay(&place, &[]).expect("a restart");
    assert!(stay.is_some(), "one client stays");
    leaves.function(before, "fill").expect("its library");
    // Its content is as it was, too.
    let again = library(&mut stays, &texts[0], 0);
    stays.function(again, "fill").expect("a function");
    drop(stays);
    wait_until("the server before has ended", || servers(&place) == 1);
    kill_server(&place);
    leaves.function(before, "stray").expect("its library");
}

#[test]
fn an_image_that_is_not_kept_binds_its_client_until_it_is_unloaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = daemon_with_descriptors(folder.path(), 256);
    // More than the keeper takes; no function of them is asked for.
    let long = "x".repeat(70_000);
    let image = |number: usize| format!("{PTX}\n// {number} {long}\n").into_bytes();
    let load = || {
        let mut peer = Peer::connect(&control(&place)).expect("a session");
        peer.attach().expect("attach");
        let modules: Vec<u64> = (0..260)
            .map(|number| peer.module(&image(number)).expect("a module"))
            .collect();
        (peer, modules)
    };
    let (mut peer, modules) = load();
    assert_eq!(place.ps()[0]["bound_by"], "unkept memory");
    let stay = restart(&place, &[]).expect_err("a client is bound");
    assert!(stay.contains("is bound by unkept memory"), "{stay}");
    peer.function(modules[259], "fill").expect("a function");
    drop(peer);
    wait_until("the old server has ended", || servers(&place) == 1);
    let (mut peer, modules) = load();
    for module in &modules[1..] {
        let unload = Object { object: *module };
        peer.post(Op::ImageUnload, &unload, &[]).expect("unload");
    }
    wait_until("nothing binds it", || place.ps()[0]["bound_by"].is_empty());
    restart(&place, &[]).expect("a restart");
    peer.function(modules[0], "fill").expect("a function");
    peer.module(&image(259)).expect("a module");
}
