//! Clients whose device memory is in host memory until their next call.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{Running, client, preloaded, succeed};
use mpsshim_tests::scene::{Scene, control, daemon, daemon_with};
use mpsshim_tests::survivors::{Survivor, kill_server, server};
use std::process::Command;

/// `suspend_client` or `resume_client` for a process, with these options.
fn move_memory(
    place: &Place,
    command: &str,
    pid: u32,
    options: &[&str],
) -> Result<(u64, u64), String> {
    let server = server(place).expect("a server").to_string();
    let pid = pid.to_string();
    let done = place.control(&[&[command, &server, &pid], options].concat());
    let text = done.out.trim().to_owned();
    if done.code != 0 {
        return Err(text);
    }
    let words: Vec<&str> = text.split(' ').collect();
    let number = |at: usize| words[at].parse().expect("a number of bytes");
    assert!(
        text.contains(" bytes in host memory, ") && text.ends_with(" bytes on the devices"),
        "{text}"
    );
    Ok((number(0), number(5)))
}

fn suspend(place: &Place, survivor: &Survivor) -> u64 {
    let moved = move_memory(place, "suspend_client", survivor.program.pid(), &[]);
    let (moved_out, _) = moved.expect("suspended");
    assert!(moved_out > 0);
    moved_out
}

/// A column of `ps` for a process, a number.
fn column(place: &Place, pid: u32, name: &str) -> u64 {
    let (rows, pid) = (place.ps(), pid.to_string());
    let row = rows.iter().find(|row| row["pid"] == pid);
    row.expect("a client")[name].parse().expect("a number")
}

fn moved_out(place: &Place, pid: u32) -> u64 {
    column(place, pid, "moved_out_memory")
}

#[test]
fn a_suspended_client_gives_its_memory_to_others_and_finds_it_as_it_was() {
    let mut scene = Scene::new();
    let place = &scene.place;
    let mut survivor = Survivor::start(place);
    let pid = survivor.program.pid();
    for _ in 0..3 {
        survivor.round();
        let before = scene.observer.mem_info().expect("memory").free;
        let bytes = suspend(place, &survivor);
        let freed = scene.observer.mem_info().expect("memory").free - before;
        assert_eq!((freed, moved_out(place, pid)), (bytes, bytes));
        // A second time there is nothing to move.
        assert_eq!(suspend(place, &survivor), bytes);
        survivor.round();
        assert_eq!(moved_out(place, pid), 0);
    }
    let bytes = suspend(place, &survivor);
    let back = move_memory(place, "resume_client", pid, &[]).expect("resumed");
    assert_eq!((back.0, moved_out(place, pid)), (0, 0));
    assert!(back.1 >= bytes);
    survivor.round();
    let log = place.log("server.log");
    assert!(
        log.contains("bytes of device memory are in host memory, after"),
        "{log}"
    );
    survivor.end();
    scene.is_as_before();
}

#[test]
fn a_suspended_client_outlives_its_server() {
    let place = daemon();
    let mut survivors = [(); 2].map(|()| Survivor::start(&place));
    survivors.iter_mut().for_each(Survivor::round);
    for round in 0..4 {
        let bytes = suspend(&place, &survivors[0]);
        match round % 2 {
            0 => drop(kill_server(&place)),
            _ => {
                let old = server(&place).expect("a server").to_string();
                let done = place.control(&["restart_server", &old]);
                assert_eq!(done.code, 0, "{}", done.out);
            }
        }
        survivors[1].round();
        assert_eq!(
            moved_out(&place, survivors[0].program.pid()),
            bytes,
            "still in host memory"
        );
        survivors[0].round();
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn a_suspended_client_that_is_killed_leaves_nothing() {
    let mut scene = Scene::new();
    let mut survivor = Survivor::start(&scene.place);
    survivor.round();
    suspend(&scene.place, &survivor);
    survivor.program.kill();
    scene.is_as_before();
}

#[test]
fn a_client_that_is_not_idle_is_not_suspended() {
    let place = daemon();
    let mut busy = Survivor::start(&place);
    // Longer than any patience.
    assert_eq!(busy.ask("launch 1000000"), "launched");
    let why = move_memory(&place, "suspend_client", busy.program.pid(), &["-t", "1"]);
    let expected = format!(
        "Client {} of server {} is not suspended: it has not been idle within the time",
        busy.program.pid(),
        server(&place).expect("a server")
    );
    assert_eq!(why, Err(expected));
    assert_eq!(moved_out(&place, busy.program.pid()), 0);
    busy.program.kill();
}

#[test]
fn a_client_that_captures_or_waits_in_a_host_function_is_not_suspended() {
    let place = daemon();
    for (request, answer, expected) in [
        ("graph", "graph", "a stream of it captures"),
        (
            "wait 1000000",
            "waits",
            "it has not been idle within the time",
        ),
    ] {
        let mut survivor = Survivor::start(&place);
        assert_eq!(survivor.ask(request), answer);
        let pid = survivor.program.pid();
        let why = move_memory(&place, "suspend_client", pid, &["-t", "1"]);
        let why = why.expect_err("it is busy");
        assert!(why.ends_with(expected), "{request}: {why}");
        assert_eq!(moved_out(&place, pid), 0);
        survivor.program.kill();
    }
}

#[test]
fn memory_that_other_processes_may_use_stays_on_the_device() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    survivor.round();
    let all = suspend(&place, &survivor);
    survivor.round();
    assert_eq!(survivor.ask("share"), "shared");
    let rest = suspend(&place, &survivor);
    assert!(rest < all, "{rest} of {all}");
    let stays = column(&place, survivor.program.pid(), "fixed_memory");
    // With the code of its modules.
    assert!((all - rest..all).contains(&stays), "{stays}");
    survivor.round();
    survivor.end();
}

#[test]
fn clients_that_do_not_exist_and_clients_in_direct_mode_are_not_suspended() {
    let place = daemon();
    let survivor = Survivor::start(&place);
    let why = move_memory(&place, "suspend_client", 1, &[]).expect_err("no client");
    assert!(why.ends_with("not found"), "{why}");
    let mut command = preloaded(env!("CARGO_BIN_EXE_survivor"), place.pipe());
    let direct = Running::start_until(command.env("MPSSHIM_MODE", "direct"), "started");
    let why = move_memory(&place, "suspend_client", direct.pid(), &[]).expect_err("direct mode");
    assert!(
        why.ends_with("it is in direct mode, and its memory belongs to its own process"),
        "{why}"
    );
    survivor.end();
}

#[test]
fn a_suspended_client_waits_until_there_is_room_for_its_memory() {
    let place = daemon_with(&[("SOFTGPU_MEMORY", "64M")]);
    let mut survivor = Survivor::start(&place);
    survivor.round();
    let bytes = suspend(&place, &survivor);
    let mut other = Peer::connect(&control(&place)).expect("a client");
    other.attach().expect("attached");
    let mut taken = Vec::new();
    while let Ok(grant) = other.memory(2 << 20) {
        taken.push(grant);
    }
    let why = move_memory(&place, "resume_client", survivor.program.pid(), &[]);
    let why = why.expect_err("the device is full");
    assert!(
        why.ends_with("the device has not enough free memory; it comes back when it has"),
        "{why}"
    );
    survivor.say("round");
    wait_until("it waits for memory", || {
        place
            .log("server.log")
            .contains("bytes of device memory, which are in host memory: CUDA_ERROR_OUT_OF_MEMORY")
    });
    assert!(moved_out(&place, survivor.program.pid()) > 0 && bytes > 0);
    drop(other);
    survivor.is_well();
    assert_eq!(moved_out(&place, survivor.program.pid()), 0);
    survivor.end();
    assert_eq!(succeed(&mut client(&place, &["work", "1"])), "busy\n");
}

#[test]
fn without_host_memory_nothing_is_moved() {
    let place = daemon_with(&[("MPSSHIM_HOST_MEMORY", "16M")]);
    let mut survivor = Survivor::start(&place);
    survivor.round();
    let why = move_memory(&place, "suspend_client", survivor.program.pid(), &[]);
    let why = why.expect_err("no room");
    assert!(why.ends_with("(MPSSHIM_HOST_MEMORY)"), "{why}");
    survivor.round();
    survivor.end();
}

/// Bytes of a block of several pieces of moved memory, of which a survivor writes one.
const SPARSE: u64 = 192 << 20;

#[test]
fn memory_that_is_zero_takes_no_host_memory() {
    let mut scene = Scene::new();
    let place = &scene.place;
    let mut survivor = Survivor::start(place);
    let pid = survivor.program.pid();
    let ask = format!("sparse {SPARSE}");
    assert_eq!(survivor.ask(&ask), "sparse");
    for _ in 0..3 {
        let before = column(place, pid, "pinned_host_memory");
        let bytes = suspend(place, &survivor);
        let taken = column(place, pid, "pinned_host_memory") - before;
        assert!(bytes > SPARSE && taken < SPARSE / 2, "{taken} of {bytes}");
        assert_eq!(survivor.ask(&ask), "sparse");
        survivor.round();
    }
    survivor.end();
    scene.is_as_before();
}

#[test]
fn memory_beyond_the_host_s_goes_to_the_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("a path");
    let place = daemon_with(&[
        ("MPSSHIM_HOST_MEMORY", "16M"),
        ("MPSSHIM_MOVED_MEMORY_DIRECTORY", path),
    ]);
    let mut survivor = Survivor::start(&place);
    let ask = format!("sparse {SPARSE}");
    assert_eq!(survivor.ask(&ask), "sparse");
    for round in 0..4 {
        suspend(&place, &survivor);
        match round {
            1 => drop(kill_server(&place)),
            2 => {
                let old = server(&place).expect("a server").to_string();
                let done = place.control(&["restart_server", &old]);
                assert_eq!(done.code, 0, "{}", done.out);
            }
            _ => {}
        }
        survivor.round();
        assert_eq!(survivor.ask(&ask), "sparse");
    }
    suspend(&place, &survivor);
    let mut names = std::fs::read_dir(path).expect("the directory");
    assert!(names.next().is_none(), "the files have no names");
    survivor.end();
}

/// A file system of this size, until it is dropped; `None` if there can be none here.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Option<SmallDisk> {
        let directory = tempfile::tempdir().expect("a directory");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
        let done = command.arg(directory.path()).output().ok()?;
        done.status.success().then_some(SmallDisk(directory))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A server that still ends has files open there.
        let mut command = Command::new("umount");
        let _ = command.arg("--lazy").arg(self.0.path()).status();
    }
}

#[test]
fn a_directory_that_is_full_or_not_there_loses_nothing() {
    let disk = SmallDisk::new("1m");
    if disk.is_none() {
        eprintln!("no file system can be mounted here: a full one is not tested");
    }
    let full = disk
        .as_ref()
        .map(|disk| disk.0.path().to_str().expect("a path"));
    let places = [
        ("/nowhere", "No such file or directory"),
        (
            full.unwrap_or("/nowhere"),
            full.map_or("No such file", |_| "No space left on device"),
        ),
    ];
    for (path, why) in places {
        let place = daemon_with(&[
            ("MPSSHIM_HOST_MEMORY", "16M"),
            ("MPSSHIM_MOVED_MEMORY_DIRECTORY", path),
        ]);
        let mut survivor = Survivor::start(&place);
        survivor.round();
        let refused = move_memory(&place, "suspend_client", survivor.program.pid(), &[]);
        let said = refused.expect_err("no room");
        let expected = format!("there is not enough host memory, and {path}: {why}");
        assert!(said.contains(&expected), "{said}");
        survivor.round();
        survivor.end();
    }
}

#[test]
fn clients_that_move_in_turn_use_the_same_pinned_memory() {
    // Enough for one of them.
    let place = daemon_with(&[("MPSSHIM_HOST_MEMORY", "64M")]);
    let mut survivors = [(); 3].map(|()| Survivor::start(&place));
    for _ in 0..3 {
        for survivor in &mut survivors {
            suspend(&place, survivor);
            survivor.round();
        }
    }
    survivors.into_iter().for_each(Survivor::end);
}

#[test]
fn memory_that_is_kept_for_moves_is_given_to_programs_that_pin_memory() {
    let place = daemon_with(&[("MPSSHIM_HOST_MEMORY", "128M")]);
    let mut survivor = Survivor::start(&place);
    suspend(&place, &survivor);
    survivor.round();
    // More than is left beside that which is kept.
    let mut other = Peer::connect(&control(&place)).expect("a client");
    other.attach().expect("attached");
    let bytes = 104 << 20;
    let pinned = other.pinned(bytes).expect("pinned memory");
    assert_eq!(pinned.0.len, bytes);
    drop(other);
    survivor.end();
}

#[test]
fn a_client_that_calls_all_the_time_is_suspended_in_between_and_loses_nothing() {
    let place = daemon();
    let mut survivor = Survivor::start(&place);
    survivor.round();
    let pid = survivor.program.pid();
    std::thread::scope(|scope| {
        let orders = scope.spawn(|| {
            for _ in 0..40 {
                // It may be refused: the client works meanwhile.
                let _ = move_memory(&place, "suspend_client", pid, &["-t", "0"]);
            }
        });
        while !orders.is_finished() {
            survivor.round();
        }
    });
    assert!(survivor.program.pid() == pid && PATIENCE.as_secs() > 0);
    survivor.end();
}
