use super::*;
use std::os::fd::AsFd;
use std::time::Instant;

fn pair() -> (OwnedFd, OwnedFd) {
    let mut fds = [0; 2];
    // SAFETY: two new descriptors, taken once.
    unsafe {
        assert_eq!(
            libc::socketpair(
                libc::AF_UNIX,
                libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
                0,
                fds.as_mut_ptr()
            ),
            0
        );
        (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
    }
}

#[test]
fn pages_are_there_and_content_outlives_a_mapping() {
    // More than one lot of either kind, and not a multiple of it.
    let len = LET_GO + POPULATED + 4096;
    let file = sealed_memfd(c"test", len as u64).unwrap();
    let mapping = Mapping::new(file.as_fd(), len).unwrap();
    let mut there = vec![0u8; len / 4096];
    // SAFETY: the mapping and a byte for each of its pages.
    let asked = unsafe { libc::mincore(mapping.base().cast(), len, there.as_mut_ptr()) };
    assert_eq!(asked, 0);
    assert!(there.iter().all(|page| page & 1 == 1));
    // SAFETY: inside the mapping, which nothing else uses.
    unsafe { mapping.base().add(len - 1).write(7) };
    drop(mapping);
    let again = Mapping::new(file.as_fd(), len).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { again.base().add(len - 1).read() }, 7);
}

#[test]
fn a_sealed_file_cannot_shrink() {
    let fd = sealed_memfd(c"test", 8192).unwrap();
    assert!(is_sealed(fd.as_fd(), 8192));
    assert!(!is_sealed(fd.as_fd(), 8193));
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), 0) }, -1);
}

#[test]
fn only_a_file_that_cannot_shrink_counts_as_sealed() {
    let file = |seals: libc::c_int| {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: plain system calls; the descriptor is new and ours.
        let fd = unsafe {
            let raw = check(libc::memfd_create(c"test".as_ptr(), flags)).unwrap();
            check(libc::ftruncate(raw, 4096)).unwrap();
            check(libc::fcntl(raw, libc::F_ADD_SEALS, seals)).unwrap();
            OwnedFd::from_raw_fd(raw)
        };
        is_sealed(fd.as_fd(), 4096)
    };
    let others = libc::F_SEAL_GROW | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;
    assert!(!file(0));
    assert!(!file(others));
    assert!(file(libc::F_SEAL_SHRINK));
    assert!(file(libc::F_SEAL_SHRINK | others));
    // Files that do not support seals.
    let program = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(!is_sealed(program.as_fd(), 1));
    let bell = Doorbell::new().unwrap();
    assert!(!is_sealed(bell.fd(), 0));
}

#[test]
fn only_a_sealed_file_is_read_and_holes_are_zeros() {
    let file = sealed_memfd(c"test", 12288).unwrap();
    // SAFETY: a plain system call that reads five bytes of a constant.
    let written = unsafe { libc::pwrite(file.as_raw_fd(), c"hello".as_ptr().cast(), 5, 4096) };
    assert_eq!(written, 5);
    let mut bytes = [7; 5000];
    read_sealed(file.as_fd(), &mut bytes).unwrap();
    assert_eq!(&bytes[4090..4105], b"\0\0\0\0\0\0hello\0\0\0\0");
    assert!(bytes[..4096].iter().all(|byte| *byte == 0));
    let error = read_sealed(file.as_fd(), &mut [0; 12289]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    let program = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(read_sealed(program.as_fd(), &mut [0]).is_err());
}

#[test]
fn a_sealed_file_that_is_open_for_writing_only_is_an_error() {
    let file = sealed_memfd(c"test", 4096).unwrap();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let written = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let error = read_sealed(written.as_fd(), &mut [0]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
}

#[test]
fn descriptors_travel() {
    let (a, b) = pair();
    let memory = sealed_memfd(c"test", 4096).unwrap();
    let bell = Doorbell::new().unwrap();
    send_packet(a.as_fd(), b"hello", &[memory.as_fd(), bell.fd()]).unwrap();
    let mut bytes = [0; 16];
    let (len, fds) = recv_packet(b.as_fd(), &mut bytes, true).unwrap();
    assert_eq!((&bytes[..len], fds.len()), (&b"hello"[..], 2));
    let here = Mapping::new(memory.as_fd(), 4096).unwrap();
    let there = Mapping::new(fds[0].as_fd(), 4096).unwrap();
    // SAFETY: both mappings are 4096 bytes of the same file.
    unsafe {
        here.base().write_volatile(42);
        assert_eq!(there.base().read_volatile(), 42);
    }
    assert!(!is_hung_up(b.as_fd()));
    drop(a);
    assert!(is_hung_up(b.as_fd()));
}

#[test]
fn a_reservation_is_exclusive() {
    let first = Reservation::at(0x2f00_0000_0000, 1 << 30).unwrap();
    assert!(Reservation::at(0x2f00_0000_0000 + (1 << 29), 1 << 30).is_err());
    assert!(first.contains(first.start, first.len) && !first.contains(first.start + 1, first.len));
    assert!(!first.contains(first.start, u64::MAX));
}

/// Whether a descriptor is readable.
fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd, no waiting.
    let ready = unsafe { libc::poll(&mut poll, 1, 0) };
    ready == 1 && poll.revents & libc::POLLIN != 0
}

fn is_close_on_exec(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain system call on a borrowed descriptor.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) == libc::FD_CLOEXEC }
}

/// The permissions with which an address is mapped, as in `/proc/self/maps`.
fn permissions(address: u64) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (first, end) = words.next()?.split_once('-')?;
        let [first, end] = [first, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        let permissions = words.next()?;
        (first..end)
            .contains(&address)
            .then(|| permissions.to_owned())
    })
}

/// Sends a packet with the same descriptor `count` times.
fn send_many(socket: BorrowedFd<'_>, bytes: &[u8], fd: BorrowedFd<'_>, count: usize) {
    let descriptors = vec![fd.as_raw_fd(); count];
    let len = size_of_val(descriptors.as_slice());
    let mut control = vec![0u64; len.div_ceil(8) + 4];
    let mut iov = libc::iovec {
        iov_base: bytes.as_ptr() as *mut _,
        iov_len: bytes.len(),
    };
    // SAFETY: as in `send_packet`; the control buffer has room for the header and the descriptors.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut iov;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = libc::CMSG_SPACE(len as u32) as usize;
        let cmsg = libc::CMSG_FIRSTHDR(&header);
        (*cmsg).cmsg_level = libc::SOL_SOCKET;
        (*cmsg).cmsg_type = libc::SCM_RIGHTS;
        (*cmsg).cmsg_len = libc::CMSG_LEN(len as u32) as usize;
        std::ptr::copy_nonoverlapping(
            descriptors.as_ptr().cast::<u8>(),
            libc::CMSG_DATA(cmsg),
            len,
        );
        let sent = libc::sendmsg(socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL);
        assert_eq!(sent, bytes.len() as isize);
    }
}

fn set_option(socket: BorrowedFd<'_>, option: libc::c_int) {
    let one: libc::c_int = 1;
    // SAFETY: reads an int from a local.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const one).cast(),
            size_of_val(&one) as u32,
        )
    };
    assert_eq!(set, 0);
}

#[test]
fn a_system_call_s_negative_result_is_its_error() {
    assert_eq!(check(0).unwrap(), 0);
    assert_eq!(check(3).unwrap(), 3);
    assert!(check(-1).is_err());
}

#[test]
fn a_sealed_file_cannot_grow_or_be_unsealed_and_closes_on_exec() {
    let fd = sealed_memfd(c"test", 8192).unwrap();
    assert!(is_close_on_exec(fd.as_fd()));
    // SAFETY: plain system calls on our descriptor.
    let (seals, grown) = unsafe {
        let raw = fd.as_raw_fd();
        (
            libc::fcntl(raw, libc::F_GET_SEALS),
            libc::ftruncate(raw, 16384),
        )
    };
    let all = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    assert_eq!((seals, grown), (all, -1));
    assert!(is_sealed(fd.as_fd(), 0) && !is_sealed(fd.as_fd(), u64::MAX));
    assert!(sealed_memfd(c"test", u64::MAX).is_err());
}

#[test]
fn a_file_that_is_opened_anew_has_a_description_of_its_own() {
    let file = sealed_memfd(c"test", 4096).unwrap();
    let again = reopen(file.as_fd()).unwrap();
    assert!(is_close_on_exec(again.as_fd()));
    // SAFETY: plain system calls that write a byte of a constant and move an offset.
    unsafe {
        assert_eq!(libc::write(again.as_raw_fd(), c"a".as_ptr().cast(), 1), 1);
        assert_eq!(libc::lseek(file.as_raw_fd(), 0, libc::SEEK_CUR), 0);
        assert_eq!(libc::lseek(again.as_raw_fd(), 0, libc::SEEK_CUR), 1);
    }
    let mut byte = [0];
    read_sealed(file.as_fd(), &mut byte).unwrap();
    assert_eq!(&byte, b"a");
}

/// The description that a memory file is made with does not count.
#[test]
fn a_file_has_a_sole_description_once_the_others_are_closed() {
    let file = sealed_memfd(c"test", 4096).unwrap();
    let first = reopen(file.as_fd()).unwrap();
    let second = reopen(first.as_fd()).unwrap();
    assert!(!is_sole(first.as_fd()) && !is_sole(second.as_fd()));
    let mapping = Mapping::new(second.as_fd(), 4096).unwrap();
    drop(second);
    assert!(!is_sole(first.as_fd()), "it is mapped");
    drop(mapping);
    assert!(is_sole(first.as_fd()));
    // SAFETY: a plain system call on our descriptor.
    let lease = unsafe { libc::fcntl(first.as_raw_fd(), libc::F_GETLEASE) };
    assert_eq!(lease, libc::F_UNLCK, "no lease is left");
}

#[test]
fn a_mapping_is_as_long_as_it_was_asked_for() {
    let file = sealed_memfd(c"test", 8192).unwrap();
    let mapping = Mapping::new(file.as_fd(), 8192).unwrap();
    assert_eq!((mapping.len(), mapping.is_empty()), (8192, false));
    assert_eq!(permissions(mapping.base() as u64).as_deref(), Some("rw-s"));
    assert!(Mapping::new(file.as_fd(), 0).is_err());
    let program = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(Mapping::new(program.as_fd(), 4096).is_err(), "not writable");
}

#[test]
fn addresses_are_free_after_a_mapping_and_reserved_after_one_that_is_retired() {
    const START: u64 = 0x2f10_0000_0000;
    let reservation = Reservation::at(START, 16384).unwrap();
    assert_eq!(permissions(START).as_deref(), Some("---p"));
    let file = sealed_memfd(c"test", 8192).unwrap();
    let map = || {
        // SAFETY: inside the reservation, of which nothing else is used.
        unsafe { Mapping::at(START, file.as_fd(), 8192) }.unwrap()
    };
    let mapping = map();
    assert_eq!(mapping.base() as u64, START);
    assert_eq!(permissions(START).as_deref(), Some("rw-s"));
    mapping.retire();
    assert_eq!(permissions(START).as_deref(), Some("---p"));
    drop(map());
    assert_eq!(permissions(START), None);
    assert_eq!(permissions(START + 8192).as_deref(), Some("---p"));
    drop(reservation);
    assert_eq!(permissions(START + 8192), None);
    drop(Reservation::at(START, 16384).unwrap());
}

#[test]
fn a_reservation_contains_what_lies_inside_as_a_whole() {
    let reserved = Reservation::at(0x2f20_0000_0000, 4096).unwrap();
    let start = reserved.start;
    for (address, len, inside) in [
        (start, 0, true),
        (start, 4096, true),
        (start, 4097, false),
        (start + 1, 4095, true),
        (start + 1, 4096, false),
        (start + 4095, 1, true),
        (start + 4096, 0, true),
        (start + 4096, 1, false),
        (start + 4097, 0, false),
        (start + 8192, 4096, false),
        (start - 1, 1, false),
        (0, 4096, false),
        (u64::MAX, 1, false),
        (start + 1, u64::MAX, false),
    ] {
        assert_eq!(
            reserved.contains(address, len),
            inside,
            "{address:#x} {len}"
        );
    }
}

#[test]
fn a_thread_sleeps_while_a_word_is_as_expected() {
    let word = AtomicU32::new(7);
    let begin = Instant::now();
    futex_wait(&word, 8, Duration::from_secs(600));
    assert!(begin.elapsed() < Duration::from_secs(600), "it is another");
    let begin = Instant::now();
    futex_wait(&word, 7, Duration::from_millis(20));
    assert!(begin.elapsed() >= Duration::from_millis(20));
}

#[test]
fn a_sleeper_is_woken_before_its_time_is_up() {
    let word = AtomicU32::new(7);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let begin = Instant::now();
            futex_wait(&word, 7, Duration::from_secs(600));
            begin.elapsed()
        });
        // It may not sleep yet.
        while !sleeper.is_finished() {
            futex_wake(&word);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(sleeper.join().unwrap() < Duration::from_secs(600));
    });
}

#[test]
fn a_doorbell_rings_until_it_is_silenced() {
    let bell = Doorbell::new().unwrap();
    assert!(!is_readable(bell.fd()) && is_close_on_exec(bell.fd()));
    // Does not block.
    bell.silence();
    bell.ring();
    bell.ring();
    assert!(is_readable(bell.fd()));
    bell.silence();
    assert!(!is_readable(bell.fd()));
    let other = Doorbell::from_fd(bell.fd().try_clone_to_owned().unwrap());
    other.ring();
    assert!(is_readable(bell.fd()));
}

#[test]
fn packets_stay_apart_and_carry_up_to_four_descriptors() {
    let (a, b) = pair();
    let bells: Vec<Doorbell> = (0..4).map(|_| Doorbell::new().unwrap()).collect();
    for count in 0..=4 {
        let descriptors: Vec<_> = bells[..count].iter().map(Doorbell::fd).collect();
        send_packet(a.as_fd(), &[count as u8; 3], &descriptors).unwrap();
    }
    for count in 0..=4 {
        let mut bytes = [9; 8];
        let (len, descriptors) = recv_packet(b.as_fd(), &mut bytes, false).unwrap();
        assert_eq!(bytes[..len], [count as u8; 3]);
        assert_eq!(descriptors.len(), count);
        for (descriptor, bell) in descriptors.into_iter().zip(&bells) {
            assert!(is_close_on_exec(descriptor.as_fd()));
            Doorbell::from_fd(descriptor).ring();
            assert!(is_readable(bell.fd()));
            bell.silence();
        }
    }
}

#[test]
fn whoever_does_not_wait_learns_that_there_is_no_packet() {
    let (a, b) = pair();
    let error = recv_packet(b.as_fd(), &mut [0; 8], false).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| recv_packet(b.as_fd(), &mut [0; 8], true));
        send_packet(a.as_fd(), b"late", &[]).unwrap();
        let (len, _) = waits.join().unwrap().unwrap();
        assert_eq!(len, 4);
    });
}

#[test]
fn a_peer_that_is_gone_is_an_error_to_send_to_and_the_end_to_receive_from() {
    let (a, b) = pair();
    send_packet(b.as_fd(), b"last", &[]).unwrap();
    assert!(!is_hung_up(a.as_fd()), "a packet is there");
    drop(b);
    assert!(is_hung_up(a.as_fd()));
    let error = send_packet(a.as_fd(), b"more", &[]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    let mut bytes = [0; 8];
    let (len, _) = recv_packet(a.as_fd(), &mut bytes, true).unwrap();
    assert_eq!(&bytes[..len], b"last");
    let (len, descriptors) = recv_packet(a.as_fd(), &mut bytes, true).unwrap();
    assert_eq!((len, descriptors.len()), (0, 0));
}

#[test]
fn a_peer_that_sends_no_more_counts_as_gone() {
    let (a, b) = pair();
    // SAFETY: a plain system call on our descriptor.
    assert_eq!(unsafe { libc::shutdown(b.as_raw_fd(), libc::SHUT_WR) }, 0);
    assert!(is_hung_up(a.as_fd()) && !is_hung_up(b.as_fd()));
}

#[test]
fn a_packet_that_is_too_long_is_refused_and_its_descriptors_are_there() {
    let (a, b) = pair();
    let bell = Doorbell::new().unwrap();
    let mut descriptors = Vec::new();
    for expected in [1, 2] {
        send_packet(a.as_fd(), &[0; 9], &[bell.fd()]).unwrap();
        let refused = recv_packet_with(b.as_fd(), &mut [0; 8], false, &mut descriptors);
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(error.to_string(), "packet too long");
        assert_eq!(descriptors.len(), expected);
    }
    send_packet(a.as_fd(), &[0; 8], &[]).unwrap();
    let len = recv_packet_with(b.as_fd(), &mut [0; 8], false, &mut descriptors);
    assert_eq!((len.unwrap(), descriptors.len()), (8, 2));
}

/// Beside the peer's credentials, which are no descriptors.
#[test]
fn there_is_room_for_as_many_descriptors_as_a_packet_can_have() {
    let (a, b) = pair();
    let bell = Doorbell::new().unwrap();
    for _ in 0..2 {
        send_many(a.as_fd(), b"many", bell.fd(), 253);
        let (len, descriptors) = recv_packet(b.as_fd(), &mut [0; 8], false).unwrap();
        assert_eq!((len, descriptors.len()), (4, 253));
        set_option(b.as_fd(), libc::SO_PASSCRED);
    }
}

#[test]
fn a_packet_that_has_lost_descriptors_is_refused() {
    let (a, b) = pair();
    // Credentials and a time stamp take room of the descriptors'.
    set_option(b.as_fd(), libc::SO_PASSCRED);
    set_option(b.as_fd(), libc::SO_TIMESTAMP);
    let bell = Doorbell::new().unwrap();
    send_many(a.as_fd(), b"many", bell.fd(), 253);
    let mut descriptors = Vec::new();
    let refused = recv_packet_with(b.as_fd(), &mut [0; 8], false, &mut descriptors);
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert_eq!(error.to_string(), "descriptors were lost");
    assert!((1..253).contains(&descriptors.len()));
}
