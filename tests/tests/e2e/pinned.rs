//! The bound of a user's pinned host memory, against the real daemon and server on softgpu.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::memory::FileRegister;
use mpsshim_proto::message::{HostAlloc, Object, Op, Range};
use mpsshim_proto::shm;
use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::wait_until;
use mpsshim_tests::peer::{Peer, Status};
use mpsshim_tests::scene::{Bystander, Scene};
use std::fs;
use std::os::fd::OwnedFd;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

const MIB: u64 = 1 << 20;

/// A daemon under which the clients of a user may have 64 MiB, their segments included.
fn bounded() -> Scene {
    Scene::with(&[("MPSSHIM_HOST_MEMORY", "64M")])
}

fn peer(scene: &Scene) -> Peer {
    let mut peer = scene.peer();
    peer.attach().expect("attach");
    peer
}

fn pin(peer: &mut Peer, mib: u64) -> Status<Range> {
    peer.pinned(mib * MIB).map(|(range, _)| range)
}

fn register(peer: &mut Peer, token: u64, mib: u64) -> Status<u64> {
    let file: OwnedFd = shm::sealed_memfd(c"registered", mib * MIB).expect("a file");
    peer.send_descriptor(token, std::os::fd::AsFd::as_fd(&file))
        .expect("send");
    let body = FileRegister {
        len: mib * MIB,
        ..FileRegister::default()
    };
    let payload = peer.ask_as(token, Op::FileRegister, &body, &[])?;
    Ok(Range::read_from_bytes(&payload).expect("a range").start)
}

const FULL: CUresult = CUDA_ERROR_OUT_OF_MEMORY;

#[test]
fn clients_of_a_user_share_a_bound() {
    let mut scene = bounded();
    let bystander = Bystander::start(scene.worker());
    let (mut one, mut two) = (peer(&scene), peer(&scene));
    let first = pin(&mut one, 32).expect("half of it");
    assert_eq!(pin(&mut one, 32).err(), Some(FULL), "segments count too");
    assert_eq!(register(&mut one, 1, 32), Err(FULL));
    pin(&mut two, 8).expect("there is room for a neighbour");
    assert_eq!(pin(&mut two, 32).err(), Some(FULL));
    let said = scene.place.log("server.log");
    let bound = "ask for 32M more; they may have 64M (MPSSHIM_HOST_MEMORY)";
    assert!(said.contains(bound), "{said}");
    // Freed room is usable again, also for another size, another way to pin, and another session.
    one.post(Op::HostFree, &first, &[]).expect("free");
    let object = register(&mut one, 2, 36).expect("the freed room");
    assert_eq!(pin(&mut two, 32).err(), Some(FULL));
    one.post(Op::FileUnregister, &Object { object }, &[])
        .expect("unregister");
    one.mem_info().expect("the session goes on");
    let last = pin(&mut two, 33).expect("the unregistered room");
    two.post(Op::HostFree, &last, &[]).expect("free");
    two.mem_info().expect("the session goes on");
    drop(two);
    wait_until("the room of a session that has ended", || {
        pin(&mut one, 44).is_ok()
    });
    drop(one);
    bystander.stop();
    scene.is_as_before();
}

#[test]
fn a_client_connects_while_its_user_has_all_it_may_have() {
    let scene = bounded();
    let mut one = peer(&scene);
    let mut mib = 64;
    while mib > 0 {
        match pin(&mut one, mib) {
            Ok(_) => {}
            Err(FULL) => mib /= 2,
            Err(other) => panic!("{other}"),
        }
    }
    scene.worker().round().expect("a new client");
    drop(one);
}

#[test]
fn the_next_server_counts_the_memory_of_its_clients() {
    let scene = bounded();
    let mut one = peer(&scene);
    pin(&mut one, 40).expect("room");
    let mut two = peer(&scene);
    let server = scene.server().to_string();
    let done = scene.place.control(&["restart_server", &server]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    for peer in [&mut one, &mut two] {
        assert_eq!(pin(peer, 20).err(), Some(FULL));
    }
    let range = pin(&mut two, 4).expect("room");
    two.post(Op::HostFree, &range, &[]).expect("free");
    drop(one);
    wait_until("the room of a session that has ended", || {
        pin(&mut two, 45).is_ok()
    });
}

#[test]
fn a_user_may_have_a_bound_of_its_own() {
    let own = format!("64M,{}=1G", nix::unistd::geteuid());
    let scene = Scene::with(&[("MPSSHIM_HOST_MEMORY", &own)]);
    pin(&mut peer(&scene), 100).expect("room");
}

/// Bytes of shared memory of a process: now, and the most of all its memory so far.
fn resident(pid: u32) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server");
    let kib = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.expect(name).trim().trim_end_matches(" kB");
        number.parse().expect(name)
    };
    (kib("RssShmem:") << 10, kib("VmHWM:") << 10)
}

fn maps_pinned(pid: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the server");
    maps.contains("memfd:mpsshim-pinned")
}

#[test]
fn population_stops_when_its_client_has_gone() {
    const LEN: u64 = 1 << 30;
    let mut scene = Scene::with(&[("MPSSHIM_HOST_MEMORY", "100%")]);
    let bystander = Bystander::start(scene.worker());
    let server = scene.server();
    let until = Instant::now() + PATIENCE;
    // Again if the server was so fast, or the test so slow, that the client was still there when a quarter was populated.
    loop {
        assert!(Instant::now() < until, "a quarter of it exists at once");
        let mut one = peer(&scene);
        // Resets the most so far.
        fs::write(format!("/proc/{server}/clear_refs"), "5").expect("the server");
        let (before, most_before) = resident(server);
        let body = HostAlloc {
            len: LEN,
            ..HostAlloc::default()
        };
        one.put(Op::HostAlloc as u16, 1, &[body.as_bytes()])
            .expect("a message");
        one.ring();
        wait_until("population begins", || {
            resident(server).0 >= before + 16 * MIB
        });
        let is_early = resident(server).0 < before + LEN / 4;
        drop(one);
        wait_until("it is gone", || !maps_pinned(server));
        let (_, most) = resident(server);
        if is_early {
            // All of it would be more than this, whatever else the server has freed meanwhile.
            let all = most_before + LEN / 8 * 7;
            break assert!(most < all, "{most_before} {most}");
        }
    }
    bystander.stop();
    scene.is_as_before();
}
