//! The part of HTTP that scrapes need: one request per connection, a limited number of connections, each for a limited
//! time. A connection whose peer does not send or read is closed to make room for others, and a scrape waits only for
//! earlier scrapes.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a peer may take to send its request, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause when no connection can be accepted.
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of connections, one thread each.
const MOST: usize = 16;
/// Longest request, bytes, and lines of its header.
const REQUEST_LIMIT: usize = 8 << 10;
const HEADERS_LIMIT: usize = 64;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// An answer: status, type, text.
type Answer = (&'static str, &'static str, String);

/// Connections by number: the oldest first.
#[derive(Default)]
struct Connections(Mutex<BTreeMap<u64, Connection>>);

struct Connection {
    stream: TcpStream,
    /// Its request is being answered, or waits for earlier scrapes.
    scrapes: bool,
}

impl Connections {
    /// Whether there is room for another connection. If needed, closes the oldest that does not scrape; its thread then
    /// ends.
    fn add(&self, number: u64, stream: TcpStream) -> bool {
        let mut connections = self.0.lock();
        if connections.len() >= MOST {
            let oldest = connections.iter().find(|(_, of)| !of.scrapes);
            let Some(oldest) = oldest.map(|(number, _)| *number) else {
                return false;
            };
            if let Some(closed) = connections.remove(&oldest) {
                // It may have been closed by its peer.
                let _ = closed.stream.shutdown(Shutdown::Both);
            }
        }
        let scrapes = false;
        connections.insert(number, Connection { stream, scrapes });
        true
    }

    fn mark(&self, number: u64, scrapes: bool) {
        if let Some(connection) = self.0.lock().get_mut(&number) {
            connection.scrapes = scrapes;
        }
    }
}

/// Answers requests for `/metrics` with the text that `scrape` returns, forever.
pub fn serve(
    listener: &TcpListener,
    scrape: impl FnMut() -> anyhow::Result<String> + Send + 'static,
) {
    let scrape = Arc::new(Mutex::new(scrape));
    let connections = Arc::new(Connections::default());
    for number in 0.. {
        if let Err(error) = take(listener, number, &scrape, &connections) {
            tracing::warn!("Cannot accept a connection for metrics: {error}");
            std::thread::sleep(PAUSE);
        }
    }
}

/// Handles the next connection in a separate thread.
fn take(
    listener: &TcpListener,
    number: u64,
    scrape: &Arc<Mutex<impl FnMut() -> anyhow::Result<String> + Send + 'static>>,
    connections: &Arc<Connections>,
) -> io::Result<()> {
    let (stream, peer) = listener.accept()?;
    if !connections.add(number, stream.try_clone()?) {
        tracing::debug!("scrape from {peer}: too many others");
        return Ok(());
    }
    let (scrape, of) = (Arc::clone(scrape), Arc::clone(connections));
    let attend = move || {
        let mut scrape = || {
            of.mark(number, true);
            let text = scrape.lock()();
            of.mark(number, false);
            text
        };
        if let Err(error) = attend(stream, &mut scrape) {
            tracing::debug!("scrape from {peer}: {error}");
        }
        of.0.lock().remove(&number);
    };
    let thread = std::thread::Builder::new().name("scrape".into());
    thread
        .spawn(attend)
        .map(drop)
        .inspect_err(|_| drop(connections.0.lock().remove(&number)))
}

fn attend(
    mut stream: TcpStream,
    scrape: &mut impl FnMut() -> anyhow::Result<String>,
) -> io::Result<()> {
    let request = read(&mut stream)?;
    let (status, kind, text) = answer(&request, scrape);
    let mut said = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    if !request.starts_with(b"HEAD ") {
        said += &text;
    }
    write(&mut stream, said.as_bytes())?;
    stream.shutdown(Shutdown::Write)
}

/// Writes all bytes, unless the peer takes too long to read.
fn write(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads a request up to the empty line after its header, or up to the maximum length.
fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while request.len() < REQUEST_LIMIT {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer)? {
            0 => break,
            len => request.extend_from_slice(&buffer[..len]),
        }
        if request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            break;
        }
    }
    Ok(request)
}

fn answer(request: &[u8], scrape: &mut impl FnMut() -> anyhow::Result<String>) -> Answer {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_LIMIT];
    let mut parsed = httparse::Request::new(&mut headers);
    let whole = parsed
        .parse(request)
        .is_ok_and(|status| status.is_complete());
    let (Some(method), Some(path), true) = (parsed.method, parsed.path, whole) else {
        return ("400 Bad Request", TEXT, "not an HTTP request\n".into());
    };
    let path = path.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET" | "HEAD", "/metrics") => match scrape() {
            Ok(text) => ("200 OK", OPEN_METRICS, text),
            Err(error) => ("503 Service Unavailable", TEXT, format!("{error:#}\n")),
        },
        ("GET" | "HEAD", _) => (
            "404 Not Found",
            TEXT,
            "the metrics are at /metrics\n".into(),
        ),
        _ => ("405 Method Not Allowed", TEXT, "only GET and HEAD\n".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: &[u8]) -> &'static str {
        answer(request, &mut || Ok("# EOF\n".into())).0
    }

    #[test]
    fn requests() {
        assert_eq!(
            status(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
            "200 OK"
        );
        assert_eq!(status(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"), "200 OK");
        assert_eq!(status(b"HEAD /metrics HTTP/1.1\r\n\r\n"), "200 OK");
        assert_eq!(status(b"GET / HTTP/1.1\r\n\r\n"), "404 Not Found");
        assert_eq!(
            status(b"POST /metrics HTTP/1.1\r\n\r\n"),
            "405 Method Not Allowed"
        );
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        for request in [
            &b""[..],
            b"GET /metrics",
            b"\xff\xfe\r\n\r\n",
            many.as_bytes(),
        ] {
            assert_eq!(status(request), "400 Bad Request");
        }
        let failed = answer(b"GET /metrics HTTP/1.1\r\n\r\n", &mut || {
            anyhow::bail!("gone")
        });
        assert_eq!(
            (failed.0, failed.2.as_str()),
            ("503 Service Unavailable", "gone\n")
        );
    }

    #[test]
    fn who_neither_sends_nor_reads_holds_nobody_up() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        // More than the socket buffers hold.
        let long = "x".repeat(64 << 20);
        std::thread::spawn(move || serve(&listener, move || Ok(long.clone())));
        let idle = || TcpStream::connect(address).expect("connect");
        let mut held = Vec::new();
        for round in 0..8 * MOST {
            let mut stream = idle();
            if round % 4 == 0 {
                // It never reads the answer, and may be closed by now.
                let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
            }
            held.push(stream);
        }
        // Until all answered connections have timed out, at most.
        let until = Instant::now() + Duration::from_secs(60);
        let mut asked = 0;
        loop {
            let mut stream = idle();
            let mut said = Vec::new();
            let sent = stream.write_all(b"GET /nothing HTTP/1.1\r\n\r\n");
            // Refused for the moment, or answered.
            let _ = sent.and_then(|()| stream.read_to_end(&mut said));
            if said.starts_with(b"HTTP/1.1 404") {
                asked += 1;
            }
            if asked == 4 {
                break;
            }
            assert!(Instant::now() < until, "never answered");
        }
        drop(held);
    }
}
