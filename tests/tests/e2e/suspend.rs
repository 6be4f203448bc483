//! Clients whose device memory is in host memory until their next call.

use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::Peer;
use mpsshim_tests::programs::{Running, client, preloaded, succeed};
use mpsshim_tests::scene::{Scene, control, daemon, daemon_with};
use mpsshim_tests::survivors::{Survivor, kill_server, server};

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

/// The column `moved_out_memory` of `ps` for a process.
fn moved_out(place: &Place, pid: u32) -> u64 {
    let rows = place.ps();
    let row = rows.iter().find(|row| row["pid"] == pid.to_string());
    row.expect("a client")["moved_out_memory"]
        .parse()
        .expect("a number")
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
