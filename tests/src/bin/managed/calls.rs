//! System calls and functions of the C library that use managed memory as their buffer, between kernels that use it.
//!
//! The device has written the memory before each call, so that the call is the first that needs it on the host.

use super::*;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Bytes of the managed block.
const LEN: usize = 120_000;
/// More than a page, and less than a pipe or a socket takes at once.
const MESSAGE: usize = 30_000;

struct Desk<'a> {
    setup: &'a Setup,
    at: u64,
    model: Vec<u8>,
    folder: PathBuf,
    /// In the file `data`.
    data: Vec<u8>,
}

fn errno(what: &str) -> String {
    format!("{what}: {}", io::Error::last_os_error())
}

/// The number that a call has given must be this.
fn gave(what: &str, expected: usize, got: isize) -> Outcome {
    match usize::try_from(got) {
        Ok(got) if got == expected => Ok(()),
        Ok(got) => Err(format!("{what}: {expected} expected, got {got}")),
        Err(_) => Err(errno(what)),
    }
}

fn pointer(at: u64) -> *mut c_void {
    at as *mut c_void
}

impl Desk<'_> {
    /// A kernel writes all of the block.
    fn device_adds(&mut self, value: u32) -> Outcome {
        let kernels = &self.setup.kernels;
        let work = Work {
            to: self.at,
            count: LEN,
            value,
            ..Work::default()
        };
        kernels.launch(kernels.add_bytes, CUstream::NULL, &work)?;
        must!(cuCtxSynchronize);
        add_bytes(&mut self.model, value);
        Ok(())
    }

    /// A kernel has written these bytes there.
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Outcome<u64> {
        let at = self.at + offset as u64;
        self.setup.device_writes(at, bytes)?;
        self.model[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(at)
    }

    fn at(&self, range: &Range<usize>) -> u64 {
        self.at + range.start as u64
    }

    /// What a call has stored and the model cannot know is as the host finds it.
    fn accept(&mut self, range: Range<usize>) {
        let found = host(self.at(&range), range.len()).to_vec();
        self.model[range].copy_from_slice(&found);
    }

    fn file(&self) -> Outcome<File> {
        File::open(self.folder.join("data")).map_err(|error| error.to_string())
    }

    fn new_file(&self) -> Outcome<File> {
        File::create(self.folder.join("written")).map_err(|error| error.to_string())
    }

    fn written(&self) -> Outcome<Vec<u8>> {
        std::fs::read(self.folder.join("written")).map_err(|error| error.to_string())
    }

    /// What was written must be the bytes of this range.
    fn was_written(&self, range: &Range<usize>) -> Outcome {
        let got = self.written()?;
        same(
            "what was written",
            self.at(range),
            &self.model[range.clone()],
            &got,
        )
    }

    /// What was read into a range.
    fn was_read(&mut self, range: &Range<usize>, first: usize) -> Outcome {
        let bytes = self.data[first..first + range.len()].to_vec();
        self.model[range.clone()].copy_from_slice(&bytes);
        compare("what was read", self.at(range), &bytes)
    }
}

fn stdio(file: &File, mode: &str) -> *mut libc::FILE {
    let mode = CString::new(mode).expect("no NUL");
    // SAFETY: a new descriptor, which the stream closes.
    unsafe { libc::fdopen(libc::dup(file.as_raw_fd()), mode.as_ptr()) }
}

fn vectors(at: u64, len: usize) -> [libc::iovec; 3] {
    let parts = [0..len / 3, len / 3..len / 2, len / 2..len];
    parts.map(|part| libc::iovec {
        iov_base: pointer(at + part.start as u64),
        iov_len: part.len(),
    })
}

fn bytes_of<T>(value: &T) -> &[u8] {
    // SAFETY: structs of C whose bytes are all initialised.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }
}

type Case = fn(&mut Desk<'_>, &mut Random) -> Outcome;

const CASES: [(&str, Case); 36] = [
    ("read", |desk, random| {
        let (range, file) = (random.range(LEN), desk.file()?);
        // SAFETY: the buffer is in the block.
        let got = unsafe { libc::read(file.as_raw_fd(), pointer(desk.at(&range)), range.len()) };
        gave("read", range.len(), got)?;
        desk.was_read(&range, 0)
    }),
    ("pread", |desk, random| {
        let (range, file) = (random.range(LEN / 2), desk.file()?);
        let first = random.below(LEN / 2);
        let at = pointer(desk.at(&range));
        // SAFETY: as above.
        let got = unsafe { libc::pread(file.as_raw_fd(), at, range.len(), first as i64) };
        gave("pread", range.len(), got)?;
        desk.was_read(&range, first)
    }),
    ("readv", |desk, random| {
        let (range, file) = (random.range(LEN), desk.file()?);
        let vectors = vectors(desk.at(&range), range.len());
        // SAFETY: as above.
        let got = unsafe { libc::readv(file.as_raw_fd(), vectors.as_ptr(), 3) };
        gave("readv", range.len(), got)?;
        desk.was_read(&range, 0)
    }),
    ("preadv, vectors in managed memory", |desk, random| {
        let (range, file) = (random.range(LEN / 2), desk.file()?);
        let vectors = vectors(desk.at(&range), range.len());
        let place = desk.put(LEN / 2 + 16, bytes_of(&vectors))?;
        // SAFETY: as above.
        let got = unsafe { libc::preadv(file.as_raw_fd(), place as *const libc::iovec, 3, 5) };
        gave("preadv", range.len(), got)?;
        desk.was_read(&range, 5)
    }),
    ("fread", |desk, random| {
        let range = random.range(LEN);
        let stream = stdio(&desk.file()?, "rb");
        let mut done = 0;
        while done < range.len() {
            let part = random.size(range.len() - done);
            let at = pointer(desk.at(&range) + done as u64);
            // SAFETY: as above; an open stream.
            let got = unsafe { libc::fread(at, 1, part, stream) };
            gave("fread", part, got as isize)?;
            done += part;
        }
        // SAFETY: an open stream.
        unsafe { libc::fclose(stream) };
        desk.was_read(&range, 0)
    }),
    ("fread of all", |desk, _| {
        let stream = stdio(&desk.file()?, "rb");
        // SAFETY: as above.
        let got = unsafe { libc::fread(pointer(desk.at), 1000, LEN / 1000, stream) };
        // SAFETY: an open stream.
        unsafe { libc::fclose(stream) };
        gave("fread", LEN / 1000, got as isize)?;
        desk.was_read(&(0..LEN), 0)
    }),
    ("fgets", |desk, random| {
        let offset = random.below(LEN - 100);
        let line = "a line of text that is read into managed memory\n";
        std::fs::write(desk.folder.join("written"), line).map_err(|error| error.to_string())?;
        let file = File::open(desk.folder.join("written")).map_err(|error| error.to_string())?;
        let stream = stdio(&file, "r");
        let at = desk.at + offset as u64;
        // SAFETY: as above.
        let got = unsafe { libc::fgets(pointer(at).cast(), 100, stream) };
        // SAFETY: an open stream.
        unsafe { libc::fclose(stream) };
        gave("fgets", 1, isize::from(!got.is_null()))?;
        let text = format!("{line}\0");
        desk.model[offset..offset + text.len()].copy_from_slice(text.as_bytes());
        Ok(())
    }),
    ("write", |desk, random| {
        let (range, file) = (random.range(LEN), desk.new_file()?);
        // SAFETY: as above.
        let got = unsafe { libc::write(file.as_raw_fd(), pointer(desk.at(&range)), range.len()) };
        gave("write", range.len(), got)?;
        desk.was_written(&range)
    }),
    ("pwrite", |desk, random| {
        let (range, file) = (random.range(LEN), desk.new_file()?);
        let at = pointer(desk.at(&range));
        // SAFETY: as above.
        let got = unsafe { libc::pwrite(file.as_raw_fd(), at, range.len(), 0) };
        gave("pwrite", range.len(), got)?;
        desk.was_written(&range)
    }),
    ("writev", |desk, random| {
        let (range, file) = (random.range(LEN), desk.new_file()?);
        let vectors = vectors(desk.at(&range), range.len());
        // SAFETY: as above.
        let got = unsafe { libc::writev(file.as_raw_fd(), vectors.as_ptr(), 3) };
        gave("writev", range.len(), got)?;
        desk.was_written(&range)
    }),
    ("pwritev, vectors in managed memory", |desk, random| {
        let (range, file) = (random.range(LEN / 2), desk.new_file()?);
        let vectors = vectors(desk.at(&range), range.len());
        let place = desk.put(LEN / 2 + 16, bytes_of(&vectors))?;
        // SAFETY: as above.
        let got = unsafe { libc::pwritev(file.as_raw_fd(), place as *const libc::iovec, 3, 0) };
        gave("pwritev", range.len(), got)?;
        desk.was_written(&range)
    }),
    ("fwrite", |desk, random| {
        let range = random.range(LEN);
        let stream = stdio(&desk.new_file()?, "wb");
        let mut done = 0;
        while done < range.len() {
            let part = random.size(range.len() - done);
            let at = pointer(desk.at(&range) + done as u64);
            // SAFETY: as above; an open stream.
            let got = unsafe { libc::fwrite(at, 1, part, stream) };
            gave("fwrite", part, got as isize)?;
            done += part;
        }
        // SAFETY: an open stream.
        let closed = unsafe { libc::fclose(stream) };
        gave("fclose", 0, closed as isize)?;
        desk.was_written(&range)
    }),
    ("fwrite of all", |desk, _| {
        let stream = stdio(&desk.new_file()?, "wb");
        // SAFETY: as above.
        let got = unsafe { libc::fwrite(pointer(desk.at), 1000, LEN / 1000, stream) };
        // SAFETY: an open stream.
        let closed = unsafe { libc::fclose(stream) };
        gave("fwrite", LEN / 1000, got as isize)?;
        gave("fclose", 0, closed as isize)?;
        desk.was_written(&(0..LEN))
    }),
    ("recv and recvfrom", |desk, random| {
        let range = random.range(MESSAGE);
        let (from, to) = sockets()?;
        let bytes = random.bytes(range.len());
        for which in 0..2 {
            // SAFETY: the buffers are as long as that.
            let got =
                unsafe { libc::send(from.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
            gave("send", bytes.len(), got)?;
            let at = pointer(desk.at(&range));
            let (fd, len) = (to.as_raw_fd(), range.len());
            // SAFETY: as above.
            let got = unsafe {
                match which {
                    0 => libc::recv(fd, at, len, libc::MSG_WAITALL),
                    _ => libc::recvfrom(fd, at, len, libc::MSG_WAITALL, null_mut(), null_mut()),
                }
            };
            gave("recv", bytes.len(), got)?;
            desk.model[range.clone()].copy_from_slice(&bytes);
            compare("what was received", desk.at(&range), &bytes)?;
            desk.device_adds(3)?;
        }
        Ok(())
    }),
    ("send and sendto", |desk, random| {
        let range = random.range(MESSAGE);
        let (from, to) = sockets()?;
        for which in 0..2 {
            let at = pointer(desk.at(&range));
            let (fd, len) = (from.as_raw_fd(), range.len());
            // SAFETY: as above.
            let got = unsafe {
                match which {
                    0 => libc::send(fd, at, len, 0),
                    _ => libc::sendto(fd, at, len, 0, std::ptr::null(), 0),
                }
            };
            gave("send", range.len(), got)?;
            let mut got = vec![0; range.len()];
            (&to)
                .read_exact(&mut got)
                .map_err(|error| error.to_string())?;
            same(
                "what was sent",
                desk.at(&range),
                &desk.model[range.clone()],
                &got,
            )?;
            desk.device_adds(3)?;
        }
        Ok(())
    }),
    (
        "sendmsg and recvmsg, all in managed memory",
        |desk, random| {
            let (sent, range) = (random.range(MESSAGE), 0..0);
            let range = MESSAGE + range.start..MESSAGE + sent.len();
            let (from, to) = sockets()?;
            let mut headers = [0u64; 2];
            for (which, part) in [&sent, &range].into_iter().enumerate() {
                let vectors = vectors(desk.at(part), part.len());
                let offset = LEN - 8192 + which * 4096;
                let vectors = desk.put(offset, bytes_of(&vectors))?;
                // SAFETY: a header of zeros is an empty one.
                let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
                header.msg_iov = vectors as *mut libc::iovec;
                header.msg_iovlen = 3;
                headers[which] = desk.put(offset + 1024, bytes_of(&header))?;
            }
            // SAFETY: headers and buffers are in the block.
            let got =
                unsafe { libc::sendmsg(from.as_raw_fd(), headers[0] as *const libc::msghdr, 0) };
            gave("sendmsg", sent.len(), got)?;
            let flags = libc::MSG_WAITALL;
            // SAFETY: as above.
            let got =
                unsafe { libc::recvmsg(to.as_raw_fd(), headers[1] as *mut libc::msghdr, flags) };
            gave("recvmsg", sent.len(), got)?;
            let bytes = desk.model[sent].to_vec();
            desk.model[range.clone()].copy_from_slice(&bytes);
            compare("what was received", desk.at(&range), &bytes)?;
            let header = LEN - 4096 + 1024;
            desk.accept(header..header + size_of::<libc::msghdr>());
            Ok(())
        },
    ),
    ("read of a pipe", |desk, random| {
        let range = random.range(MESSAGE);
        let (reader, mut writer) = io::pipe().map_err(|error| error.to_string())?;
        let bytes = random.bytes(range.len());
        io::Write::write_all(&mut writer, &bytes).map_err(|error| error.to_string())?;
        // SAFETY: as above.
        let got = unsafe { libc::read(reader.as_raw_fd(), pointer(desk.at(&range)), range.len()) };
        gave("read", range.len(), got)?;
        desk.model[range.clone()].copy_from_slice(&bytes);
        compare("what was read", desk.at(&range), &bytes)
    }),
    ("write to a pipe", |desk, random| {
        let range = random.range(MESSAGE);
        let (mut reader, writer) = io::pipe().map_err(|error| error.to_string())?;
        let at = pointer(desk.at(&range));
        // SAFETY: as above.
        let got = unsafe { libc::write(writer.as_raw_fd(), at, range.len()) };
        gave("write", range.len(), got)?;
        let mut got = vec![0; range.len()];
        reader
            .read_exact(&mut got)
            .map_err(|error| error.to_string())?;
        same(
            "what was written",
            desk.at(&range),
            &desk.model[range.clone()],
            &got,
        )
    }),
    ("getrandom", |desk, random| {
        let range = random.range(10_000);
        // SAFETY: as above.
        let got = unsafe { libc::getrandom(pointer(desk.at(&range)), range.len().min(256), 0) };
        gave("getrandom", range.len().min(256), got)?;
        desk.accept(range);
        Ok(())
    }),
    ("memcpy, memmove, memcmp, memset", |desk, random| {
        let range = random.range(LEN);
        let bytes = random.bytes(range.len());
        let at = pointer(desk.at(&range));
        // SAFETY: both are as long as that.
        unsafe { libc::memcpy(at, bytes.as_ptr().cast(), range.len()) };
        desk.model[range.clone()].copy_from_slice(&bytes);
        desk.device_adds(1)?;
        let mut got = vec![0u8; range.len()];
        // SAFETY: as above.
        unsafe { libc::memcpy(got.as_mut_ptr().cast(), at, range.len()) };
        same("memcpy", desk.at(&range), &desk.model[range.clone()], &got)?;
        desk.device_adds(1)?;
        let model = desk.model[range.clone()].as_ptr();
        // SAFETY: as above.
        let differ = unsafe { libc::memcmp(at, model.cast(), range.len()) };
        gave("memcmp", 0, differ as isize)?;
        desk.device_adds(1)?;
        // SAFETY: as above.
        unsafe { libc::memmove(pointer(desk.at + 100), pointer(desk.at), LEN - 100) };
        desk.model.copy_within(..LEN - 100, 100);
        desk.device_adds(1)?;
        // SAFETY: as above.
        unsafe { libc::memset(at, 77, range.len()) };
        desk.model[range].fill(77);
        Ok(())
    }),
    ("snprintf and strlen", |desk, random| {
        let offset = random.below(LEN - 100);
        let (at, number) = (desk.at + offset as u64, random.number());
        let format = desk.put(LEN - 50, b"number %lu\0")?;
        if offset > LEN - 150 {
            return Ok(());
        }
        // SAFETY: the format takes this argument.
        let got = unsafe { libc::snprintf(pointer(at).cast(), 100, format as *const i8, number) };
        let text = format!("number {number}\0");
        gave("snprintf", text.len() - 1, got as isize)?;
        desk.model[offset..offset + text.len()].copy_from_slice(text.as_bytes());
        desk.device_adds(0)?;
        // SAFETY: a text that ends with NUL.
        let got = unsafe { libc::strlen(at as *const i8) };
        gave("strlen", text.len() - 1, got as isize)
    }),
    ("getcwd", |desk, random| {
        let offset = random.below(LEN - 5000);
        let expected = std::env::current_dir().map_err(|error| error.to_string())?;
        let expected = format!("{}\0", expected.display());
        // SAFETY: as above.
        let got = unsafe { libc::getcwd(pointer(desk.at + offset as u64).cast(), 5000) };
        match got.is_null() {
            true => Err(errno("getcwd")),
            false => {
                let range = offset..offset + expected.len();
                desk.model[range.clone()].copy_from_slice(expected.as_bytes());
                compare("getcwd", desk.at(&range), expected.as_bytes())
            }
        }
    }),
    ("readlink", |desk, random| {
        let offset = random.below(LEN / 2);
        let path = desk.put(LEN - 4096, b"/proc/self/exe\0")?;
        let expected = std::env::current_exe().map_err(|error| error.to_string())?;
        let expected = expected.display().to_string();
        let at = pointer(desk.at + offset as u64).cast();
        // SAFETY: a NUL-ended path, a buffer in the block.
        let got = unsafe { libc::readlink(path as *const i8, at, 4096) };
        gave("readlink", expected.len(), got)?;
        desk.model[offset..offset + expected.len()].copy_from_slice(expected.as_bytes());
        Ok(())
    }),
    ("open, access and stat of a path", |desk, _| {
        let path = format!("{}\0", desk.folder.join("data").display());
        let path = desk.put(5000, path.as_bytes())? as *const i8;
        // SAFETY: a NUL-ended path.
        let fd = unsafe { libc::open(path, libc::O_RDONLY) };
        if fd < 0 {
            return Err(errno("open"));
        }
        // SAFETY: opened above.
        unsafe { libc::close(fd) };
        desk.device_adds(0)?;
        // SAFETY: a NUL-ended path.
        gave("access", 0, unsafe { libc::access(path, libc::R_OK) }
            as isize)?;
        desk.device_adds(0)?;
        let out = 100_000..100_000 + size_of::<libc::stat>();
        let at = desk.at(&out) as *mut libc::stat;
        // SAFETY: a NUL-ended path, a struct in the block.
        gave("stat", 0, unsafe { libc::stat(path, at) } as isize)?;
        // SAFETY: as above.
        gave("st_size", LEN, unsafe { (*at).st_size } as isize)?;
        desk.accept(out);
        Ok(())
    }),
    ("ioctl(FIONREAD)", |desk, random| {
        let (from, to) = sockets()?;
        let sent = [1u8; 37];
        // SAFETY: as above.
        let got = unsafe { libc::send(from.as_raw_fd(), sent.as_ptr().cast(), sent.len(), 0) };
        gave("send", sent.len(), got)?;
        let offset = random.below(LEN / 4 - 1) * 4;
        let at = desk.at + offset as u64;
        // SAFETY: a word of the block.
        let status = unsafe { libc::ioctl(to.as_raw_fd(), libc::FIONREAD, at as *mut c_int) };
        gave("ioctl", 0, status as isize)?;
        desk.model[offset..offset + 4].copy_from_slice(&37i32.to_le_bytes());
        Ok(())
    }),
    ("clock_gettime and gettimeofday", |desk, random| {
        let offset = random.below(LEN / 8 - 2) * 8;
        let at = desk.at + offset as u64;
        // SAFETY: a struct in the block.
        let status =
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, at as *mut libc::timespec) };
        gave("clock_gettime", 0, status as isize)?;
        desk.accept(offset..offset + 16);
        desk.device_adds(1)?;
        // A clock that the kernel reads.
        let clock = libc::CLOCK_THREAD_CPUTIME_ID;
        // SAFETY: as above.
        let status = unsafe { libc::clock_gettime(clock, at as *mut libc::timespec) };
        gave("clock_gettime of the thread", 0, status as isize)?;
        desk.accept(offset..offset + 16);
        desk.device_adds(1)?;
        // SAFETY: as above.
        let status = unsafe { libc::gettimeofday(at as *mut libc::timeval, null_mut()) };
        gave("gettimeofday", 0, status as isize)?;
        desk.accept(offset..offset + 16);
        Ok(())
    }),
    ("nanosleep", |desk, _| {
        let mut bytes = 0u64.to_le_bytes().to_vec();
        bytes.extend(1000u64.to_le_bytes());
        let at = desk.put(8192, &bytes)?;
        // SAFETY: a struct in the block.
        let status = unsafe { libc::nanosleep(at as *const libc::timespec, null_mut()) };
        gave("nanosleep", 0, status as isize)
    }),
    ("pipe and socketpair", |desk, random| {
        let offset = random.below(LEN / 4 - 2) * 4;
        let at = desk.at + offset as u64;
        for which in 0..2 {
            let out = at as *mut c_int;
            // SAFETY: two words of the block.
            let status = unsafe {
                match which {
                    0 => libc::pipe(out),
                    _ => libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, out),
                }
            };
            gave("pipe or socketpair", 0, status as isize)?;
            for end in 0..2 {
                // SAFETY: as above, and made by the call.
                gave("close", 0, unsafe { libc::close(*out.add(end)) } as isize)?;
            }
            desk.accept(offset..offset + 8);
            desk.device_adds(1)?;
        }
        Ok(())
    }),
    ("poll", |desk, _| {
        let (from, to) = sockets()?;
        let entry = libc::pollfd {
            fd: to.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: as above.
        let got = unsafe { libc::send(from.as_raw_fd(), [1u8].as_ptr().cast(), 1, 0) };
        gave("send", 1, got)?;
        let at = desk.put(70_000, bytes_of(&entry))? as *mut libc::pollfd;
        // SAFETY: a struct in the block.
        gave("poll", 1, unsafe { libc::poll(at, 1, 1000) } as isize)?;
        // SAFETY: as above.
        gave("revents", libc::POLLIN as usize, unsafe { (*at).revents }
            as isize)?;
        desk.accept(70_000..70_000 + size_of::<libc::pollfd>());
        Ok(())
    }),
    ("uname", |desk, _| {
        let range = 9000..9000 + size_of::<libc::utsname>();
        // SAFETY: a struct in the block.
        let status = unsafe { libc::uname(desk.at(&range) as *mut libc::utsname) };
        gave("uname", 0, status as isize)?;
        // SAFETY: as above.
        let name = unsafe { std::ffi::CStr::from_ptr(desk.at(&range) as *const i8) };
        gave("uname's name", 5, name.to_bytes().len() as isize)?;
        desk.accept(range);
        Ok(())
    }),
    ("getsockname", |desk, _| {
        let (from, _to) = sockets()?;
        let len = desk.put(20_000, &110u32.to_le_bytes())? as *mut libc::socklen_t;
        let at = (desk.at + 24_576) as *mut libc::sockaddr;
        // SAFETY: an address of 110 bytes, and its length.
        let status = unsafe { libc::getsockname(from.as_raw_fd(), at, len) };
        gave("getsockname", 0, status as isize)?;
        // SAFETY: as above.
        gave("its length", 2, unsafe { *len } as isize)?;
        desk.accept(20_000..20_004);
        desk.accept(24_576..24_576 + 110);
        Ok(())
    }),
    ("a raw system call", |desk, random| {
        // As programs do that have no C library.
        let (range, file) = (random.range(LEN), desk.new_file()?);
        let (fd, at) = (file.as_raw_fd(), desk.at(&range));
        // SAFETY: as write.
        let got = unsafe { libc::syscall(libc::SYS_write, fd, at, range.len()) };
        gave("write", range.len(), got as isize)?;
        desk.was_written(&range)?;
        desk.device_adds(1)?;
        let file = desk.file()?;
        // SAFETY: as read.
        let got = unsafe { libc::syscall(libc::SYS_read, file.as_raw_fd(), at, range.len()) };
        gave("read", range.len(), got as isize)?;
        desk.was_read(&range, 0)
    }),
    ("select and epoll_wait", |desk, _| {
        let (from, to) = sockets()?;
        let fd = to.as_raw_fd();
        // SAFETY: a byte; a new descriptor, closed below.
        let (sent, epoll) = unsafe {
            let sent = libc::send(from.as_raw_fd(), [1u8].as_ptr().cast(), 1, 0);
            (sent, libc::epoll_create1(0))
        };
        gave("send", 1, sent)?;
        let wanted = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 77,
        };
        let event = desk.put(30_000, bytes_of(&wanted))? as *mut libc::epoll_event;
        // SAFETY: a struct in the block.
        let status = unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, event) };
        gave("epoll_ctl", 0, status as isize)?;
        desk.device_adds(1)?;
        // SAFETY: as above.
        let got = unsafe { libc::epoll_wait(epoll, event, 1, 1000) };
        // SAFETY: opened above.
        unsafe { libc::close(epoll) };
        gave("epoll_wait", 1, got as isize)?;
        desk.model[30_000..30_012].copy_from_slice(bytes_of(&wanted));
        let mut set = [0u8; size_of::<libc::fd_set>()];
        set[fd as usize / 8] = 1 << (fd % 8);
        let set = desk.put(40_000, &set)? as *mut libc::fd_set;
        let time = desk.put(50_000, &[0; 16])? as *mut libc::timeval;
        // SAFETY: structs in the block.
        let got = unsafe { libc::select(fd + 1, set, null_mut(), null_mut(), time) };
        gave("select", 1, got as isize)
    }),
    ("process_vm_readv and process_vm_writev", |desk, random| {
        let range = random.range(LEN);
        let mut other = random.bytes(range.len());
        let local = vectors(desk.at(&range), range.len());
        let remote = libc::iovec {
            iov_base: other.as_mut_ptr().cast(),
            iov_len: other.len(),
        };
        // SAFETY: buffers of this process of that length.
        let got =
            unsafe { libc::process_vm_readv(libc::getpid(), local.as_ptr(), 3, &remote, 1, 0) };
        gave("process_vm_readv", range.len(), got)?;
        desk.model[range.clone()].copy_from_slice(&other);
        desk.device_adds(1)?;
        // SAFETY: as above.
        let got =
            unsafe { libc::process_vm_writev(libc::getpid(), local.as_ptr(), 3, &remote, 1, 0) };
        gave("process_vm_writev", range.len(), got)?;
        same(
            "what was copied",
            desk.at(&range),
            &desk.model[range.clone()],
            &other,
        )
    }),
    (
        "raw system calls with vectors and messages",
        |desk, random| {
            let range = random.range(MESSAGE);
            let (from, to) = sockets()?;
            let fds = [from.as_raw_fd(), to.as_raw_fd()];
            let parts = vectors(desk.at(&range), range.len());
            // SAFETY: as writev.
            let got = unsafe { libc::syscall(libc::SYS_writev, fds[0], parts.as_ptr(), 3) };
            gave("writev", range.len(), got as isize)?;
            desk.device_adds(1)?;
            let (at, len, flags) = (desk.at(&range), range.len(), libc::MSG_WAITALL);
            // SAFETY: as recvfrom.
            let got = unsafe { libc::syscall(libc::SYS_recvfrom, fds[1], at, len, flags, 0, 0) };
            gave("recvfrom", range.len(), got as isize)?;
            for byte in &mut desk.model[range.clone()] {
                *byte = byte.wrapping_sub(1);
            }
            Ok(())
        },
    ),
    ("the library of Rust", |desk, random| {
        let range = random.range(LEN);
        let file = desk.file()?;
        file.read_exact_at(host(desk.at(&range), range.len()), 0)
            .map_err(|error| error.to_string())?;
        desk.was_read(&range, 0)?;
        desk.device_adds(1)?;
        let path = desk.folder.join("written");
        std::fs::write(path, &*host(desk.at(&range), range.len()))
            .map_err(|error| error.to_string())?;
        desk.was_written(&range)
    }),
];

fn sockets() -> Outcome<(
    std::os::unix::net::UnixStream,
    std::os::unix::net::UnixStream,
)> {
    std::os::unix::net::UnixStream::pair().map_err(|error| error.to_string())
}

fn one(desk: &mut Desk<'_>, random: &mut Random, case: Case) -> Outcome {
    desk.device_adds(random.number() as u32)?;
    case(desk, random)?;
    if random.one_of(2) {
        let got = desk.setup.device_reads(desk.at, LEN)?;
        same("as the device reads it", desk.at, &desk.model, &got)?;
    }
    compare("afterwards", desk.at, &desk.model)
}

pub fn calls(setup: &Setup, random: &mut Random, until: Instant) -> Outcome {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let data = random.bytes(LEN);
    std::fs::write(folder.path().join("data"), &data).map_err(|error| error.to_string())?;
    let mut desk = Desk {
        setup,
        at: allocate(LEN)?,
        model: random.bytes(LEN),
        folder: folder.path().to_owned(),
        data,
    };
    host(desk.at, LEN).copy_from_slice(&desk.model);
    let mut failed = Vec::new();
    loop {
        for (name, case) in CASES {
            if setup.without.iter().any(|without| without == name) {
                continue;
            }
            if let Err(error) = one(&mut desk, random, case) {
                failed.push(format!("{name}: {error}"));
                // The others begin anew.
                let model = desk.model.clone();
                host(desk.at, LEN).copy_from_slice(&model);
            }
        }
        if !failed.is_empty() {
            return Err(format!("\n{}", failed.join("\n")));
        }
        if Instant::now() > until {
            return free(desk.at);
        }
    }
}
