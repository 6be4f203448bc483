//! Clients whose images, or whose requests to load them, are meant to do harm.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::image::{LinkAdd, LinkCreate};
use mpsshim_proto::message::{ImageLoad, Named, Object, Op};
use mpsshim_tests::lingering::lingering;
use mpsshim_tests::peer::{PTX, Peer, Status, Worker, memory_file};
use mpsshim_tests::scene::{Scene, control, reconnect};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::{Pid, ftruncate};
use std::fs::{self, File};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Loads `content` as a library for a device.
fn load_library(peer: &mut Peer, content: &[u8], device: u32) -> Status<u64> {
    let body = ImageLoad {
        image: peer.handle(Kind::Library),
        device,
        ..peer.image_load(content)
    };
    let file = memory_file(content).expect("a memory file");
    peer.load(&body, &[], file.as_fd())
}

#[test]
fn an_image_for_a_device_that_is_not_there_is_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        for device in [1, 5, 15, 16, 255, 256, 1 << 16, u32::MAX] {
            let loaded = load_library(&mut peer, PTX.as_bytes(), device);
            assert_eq!(loaded, Err(CUDA_ERROR_INVALID_DEVICE), "device {device}");
            let body = ImageLoad {
                device,
                ..peer.image_load(PTX.as_bytes())
            };
            let file = memory_file(PTX.as_bytes()).expect("a memory file");
            let loaded = peer.load(&body, &[], file.as_fd());
            assert_eq!(loaded, Err(CUDA_ERROR_INVALID_DEVICE), "device {device}");
        }
        let library = load_library(&mut peer, PTX.as_bytes(), 0).expect("a library");
        let leave = Named {
            parent: library,
            device: u32::MAX,
            pad: 0,
        };
        peer.post(Op::ImageLeave, &leave, &[]).expect("a session");
        let stream = peer.stream().expect("a stream");
        assert_eq!(peer.finish(stream), Err(CUDA_ERROR_INVALID_DEVICE));
    });
}

/// A sealed memory file of holes; of huge pages with `MFD_HUGETLB`, if the kernel knows such.
fn holes(flags: MFdFlags) -> nix::Result<File> {
    let flags = flags | MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = memfd_create(c"holes", flags)?;
    ftruncate(&file, HUGE_PAGE)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK))?;
    Ok(file.into())
}

const HUGE_PAGE: i64 = 2 << 20;

/// Whether a file of holes is refused as what it holds, zeros, with its holes left as they are.
fn zeros_are_refused(peer: &mut Peer, file: &File, len: usize) {
    let zeros = vec![0; len];
    let body = peer.image_load(&zeros);
    let loaded = peer.load(&body, &[], file.as_fd());
    assert_eq!(loaded, Err(CUDA_ERROR_INVALID_IMAGE), "{len} bytes");
    let create = LinkCreate {
        link: peer.handle(Kind::Link),
        ..LinkCreate::default()
    };
    peer.ask_as(0, Op::LinkCreate, &create, &[])
        .expect("a linker");
    let add = LinkAdd {
        link: create.link,
        len: len as u64,
        kind: CU_JIT_INPUT_PTX,
        ..LinkAdd::default()
    };
    peer.send_descriptor(1, file.as_fd()).expect("sent");
    let added = peer.ask_as(1, Op::LinkAdd, &add, b"zeros\0").map(drop);
    assert_eq!(added, Err(CUDA_ERROR_INVALID_IMAGE), "{len} bytes");
    let object = create.link;
    peer.post(Op::LinkDestroy, &Object { object }, &[])
        .expect("a session");
    assert_eq!(file.metadata().expect("metadata").blocks(), 0);
}

/// The server does not map what a client can take pages out of. Only the client's own files are as large as they say.
#[test]
fn images_in_files_of_holes_are_refused() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        let file = holes(MFdFlags::empty()).expect("a memory file");
        for len in [1, 5000, HUGE_PAGE as usize] {
            zeros_are_refused(&mut peer, &file, len);
        }
    });
}

#[test]
fn images_in_huge_pages_are_refused_without_them() {
    let file = match holes(MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB) {
        Ok(file) => file,
        Err(error) => return println!("not tested: huge pages ({error})"),
    };
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        for len in [1, 5000, HUGE_PAGE as usize] {
            zeros_are_refused(&mut peer, &file, len);
        }
    });
}

/// A fatbin with a text in it.
fn fatbin(text: &str) -> Vec<u8> {
    let size = (text.len() + 1).next_multiple_of(8);
    let mut bytes = vec![0; 16 + 64 + size];
    bytes[..4].copy_from_slice(&0xBA55_ED50u32.to_le_bytes());
    bytes[4..6].copy_from_slice(&1u16.to_le_bytes());
    bytes[6..8].copy_from_slice(&16u16.to_le_bytes());
    bytes[8..16].copy_from_slice(&(64 + size as u64).to_le_bytes());
    let entry = &mut bytes[16..];
    entry[..2].copy_from_slice(&1u16.to_le_bytes());
    entry[4..8].copy_from_slice(&64u32.to_le_bytes());
    entry[8..16].copy_from_slice(&(size as u64).to_le_bytes());
    entry[28..32].copy_from_slice(&75u32.to_le_bytes());
    entry[64..64 + text.len()].copy_from_slice(text.as_bytes());
    bytes
}

/// What lies behind a fatbin is looked at when it is loaded the second time.
#[test]
fn what_follows_a_fatbin_does_not_keep_the_server() {
    let good = fatbin(PTX);
    let no_entry = {
        let mut bytes = fatbin("");
        bytes[16 + 4..16 + 16].fill(0);
        bytes
    };
    let no_fatbin = {
        let mut bytes = vec![0; 16];
        bytes[..4].copy_from_slice(&good[..4]);
        bytes
    };
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        for end in [no_entry, no_fatbin] {
            let image = [good.clone(), end].concat();
            for _ in 0..2 {
                peer.module(&image).expect("a module");
            }
        }
    });
}

/// More loads than the slow lane has threads take long; who comes meanwhile is served.
#[test]
fn long_loads_do_not_keep_others_waiting() {
    let scene = Scene::new();
    let text = format!("// softgpu: takes ms 60000\n{PTX}");
    let mut busy = Vec::new();
    for _ in 0..6 {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        let body = peer.image_load(text.as_bytes());
        let file = memory_file(text.as_bytes()).expect("a memory file");
        peer.send_descriptor(1, file.as_fd()).expect("sent");
        let before = peer.header().answers.0.load(Ordering::Acquire);
        peer.post_as(1, Op::ImageLoad, &body).expect("a session");
        busy.push((peer, before));
    }
    let mut worker = Worker::connect(&control(&scene.place)).expect("a client");
    worker.round().expect("a round");
    for (peer, before) in &busy {
        let answers = peer.header().answers.0.load(Ordering::Acquire);
        assert_eq!(answers, *before, "its load still goes on");
    }
}

/// One that the server takes in, and one that lies unread in the connection when the client leaves.
#[test]
fn descriptors_that_do_not_close_hold_nobody_up() {
    Scene::new().beside_a_worker(|scene| {
        let mut listeners = Vec::new();
        for _ in 0..6 {
            let mut peer = scene.peer();
            peer.attach().expect("attach");
            let body = peer.image_load(PTX.as_bytes());
            for token in [7, 8] {
                let (listener, stream) = lingering();
                listeners.push(listener);
                peer.send_descriptor(token, stream.as_fd()).expect("sent");
            }
            let loaded = peer.ask_as(7, Op::ImageLoad, &body, &[]);
            assert_eq!(loaded, Err(CUDA_ERROR_INVALID_IMAGE));
        }
        scene
            .worker()
            .round()
            .expect("a round of a client that comes now");
        // They close when nobody is left to take what they have; then nothing may be left of them here.
        drop(listeners);
    });
}

#[test]
fn a_packet_with_many_descriptors_leaves_none_behind() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        let body = peer.image_load(PTX.as_bytes());
        let file = memory_file(PTX.as_bytes()).expect("a memory file");
        let note = DescriptorNote { token: 1, len: 0 };
        let many = [file.as_raw_fd(); 250];
        let sent = sendmsg::<()>(
            peer.socket.as_raw_fd(),
            &[IoSlice::new(note.as_bytes())],
            &[ControlMessage::ScmRights(&many)],
            MsgFlags::empty(),
            None,
        );
        sent.expect("sent");
        assert!(peer.ask_as(1, Op::ImageLoad, &body, &[]).is_err());
        assert_eq!(peer.await_end(), Ok(CUDA_ERROR_MPS_RPC_FAILURE));
    });
}

/// Each linker is a thread of the server's.
#[test]
fn a_session_has_few_linkers() {
    Scene::new().beside_a_worker(|scene| {
        let mut peer = scene.peer();
        peer.attach().expect("attach");
        let create = |peer: &mut Peer| {
            let body = LinkCreate {
                link: peer.handle(Kind::Link),
                ..LinkCreate::default()
            };
            let made = peer.ask_as(0, Op::LinkCreate, &body, &[]);
            made.map(|_| body.link)
        };
        let made: Vec<Status<u64>> = (0..100).map(|_| create(&mut peer)).collect();
        assert!(made[..16].iter().all(Status::is_ok));
        let refused = |made: &Status<u64>| *made == Err(CUDA_ERROR_OUT_OF_MEMORY);
        assert!(made[16..].iter().all(refused));
        let tasks = fs::read_dir(format!("/proc/{}/task", scene.server())).expect("threads");
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
        let linkers = tasks.filter_map(|task| name(task.ok()?).ok());
        assert_eq!(linkers.filter(|name| name.trim() == "link").count(), 16);
        let object = made[3].expect("a linker");
        peer.post(Op::LinkDestroy, &Object { object }, &[])
            .expect("a session");
        create(&mut peer).expect("one in its place");
    });
}

#[test]
fn clients_of_a_server_that_aborts_learn_of_it_and_the_next_one_comes() {
    let mut scene = Scene::new();
    scene.observer.bind().expect("a pool");
    let pid = Pid::from_raw(scene.server() as i32);
    kill(pid, Signal::SIGABRT).expect("kill");
    let status = scene.observer.await_end();
    assert_eq!(status, Ok(CUDA_ERROR_MPS_RPC_FAILURE));
    let mut worker = reconnect(&scene.place);
    worker.round().expect("a round");
    assert_ne!(worker.peer.welcome.server_pid as i32, pid.as_raw());
}
