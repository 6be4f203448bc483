//! What a client can see of its session: answers to queries, and the contents of its memory.

use mpsshim_api::cuda::{
    CU_DEV_RESOURCE_TYPE_SM, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_TIMEOUT,
    CUDA_SUCCESS, CUresult,
};
use mpsshim_proto::arena::is_host;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::context::ResourceQuery;
use mpsshim_proto::message::graph::{
    GraphAttribute, GraphEnabled, GraphList, GraphListed, LIST_MOST, list,
};
use mpsshim_proto::message::memory::{Access, GetAccess, Location, PoolAccess, PoolAttribute};
use mpsshim_proto::message::{
    Attach, EventPair, FunctionAttribute, Limit, Named, Object, Occupancy, Op, PointerQuery, Range,
    Side,
};
use mpsshim_tests::fuzzing::client::{Client, Sent};
use mpsshim_tests::fuzzing::images::SAFE_PARAMS;
use mpsshim_tests::fuzzing::message::is_of_graphs;
use mpsshim_tests::peer::{Peer, Status, copy, launch, memset};
use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes of a range that are read.
const MOST_BYTES: u64 = 64 << 10;
/// Objects of a kind that are asked about.
const MOST_OBJECTS: usize = 12;
/// Devices of the server.
const DEVICES: u32 = 2;

/// What it reads with: a stream, and device memory that nothing else uses.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    pub stream: u64,
    pub scratch: Range,
}

/// Something to ask.
#[derive(Clone, Debug)]
enum Question {
    /// A request. Bytes of its answer before `from` are not compared.
    Ask { op: Op, body: Vec<u8>, from: usize },
    /// The content of a range.
    Content { side: Side, range: Range },
    /// A launch of a kernel that always does the same.
    Launch { function: u64 },
    /// The content of the variable that it writes.
    Table { parent: u64 },
}

/// Its answer: status and payload.
type Answer = (CUresult, Vec<u8>);

/// Questions with their answers.
#[derive(Debug)]
pub struct View(Vec<(Question, Answer)>);

/// The first answer that has changed.
#[derive(Debug)]
pub struct Difference {
    question: Question,
    before: Answer,
    now: Answer,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.question {
            Question::Ask { op, body, .. } => {
                let words: Vec<String> = body.chunks(8).map(hex).collect();
                write!(f, "{op:?} [{}]", words.join(" "))?;
            }
            Question::Content { side, range } => {
                write!(f, "{} bytes at {:#x} ({side:?})", range.len, range.start)?;
            }
            Question::Launch { function } => write!(f, "launch of {function:#x}")?,
            Question::Table { parent } => write!(f, "table of {parent:#x}")?,
        }
        let ((before, old), (now, new)) = (&self.before, &self.now);
        let at = old.iter().zip(new).take_while(|(old, new)| old == new);
        let at = at.count() & !7;
        let part = |bytes: &[u8]| hex(&bytes[at..bytes.len().min(at + 32)]);
        write!(
            f,
            ": {before} {} bytes before, {now} {} bytes now; from byte {at} on {} before, {} now",
            old.len(),
            new.len(),
            part(old),
            part(new)
        )
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl View {
    /// Asks all that can be asked about what the client knows.
    ///
    /// # Errors
    /// The session's end, or no answer.
    pub fn take(client: &mut Client, reader: Reader) -> Result<View, Sent> {
        let questions = questions(client);
        let mut rows = Vec::with_capacity(questions.len());
        for question in questions {
            let answer = answer(client, reader, &question)?;
            // The next server may give the handle of a node that was destroyed to another one.
            let is_stale = answer.0 == CUDA_ERROR_INVALID_VALUE
                && matches!(&question, Question::Ask { op, .. } if is_of_graphs(*op));
            if !is_stale {
                rows.push((question, answer));
            }
        }
        Ok(View(rows))
    }

    /// Does not compare contents of memory.
    pub fn forget_contents(&mut self) {
        let is_content = |question: &Question| matches!(question, Question::Content { .. });
        self.0.retain(|(question, _)| !is_content(question));
    }

    /// Number of questions.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Asks the same again.
    ///
    /// # Errors
    /// As [`View::take`].
    pub fn differs(
        &self,
        client: &mut Client,
        reader: Reader,
    ) -> Result<Option<Box<Difference>>, Sent> {
        for (question, before) in &self.0 {
            let now = answer(client, reader, question)?;
            if now != *before {
                return Ok(Some(Box::new(Difference {
                    question: question.clone(),
                    before: before.clone(),
                    now,
                })));
            }
        }
        Ok(None)
    }
}

/// The nodes of a graph, and those without dependencies, are in no particular order.
fn without_order(op: Op, body: &[u8], mut answer: Vec<u8>) -> Vec<u8> {
    let is_set = op == Op::GraphList
        && GraphList::read_from_bytes(body)
            .is_ok_and(|asked| [list::NODES, list::ROOTS].contains(&asked.what));
    let counts = size_of::<GraphListed>().min(answer.len());
    if is_set {
        answer[counts..].as_chunks_mut::<8>().0.sort_unstable();
    }
    answer
}

fn answer(client: &mut Client, reader: Reader, question: &Question) -> Result<Answer, Sent> {
    match question {
        Question::Ask { op, body, from } => {
            let (status, payload) = client.ask(*op, body)?;
            let part = match status.is_ok() {
                true => payload.get(*from..).unwrap_or_default().to_vec(),
                false => Vec::new(),
            };
            Ok((status, without_order(*op, body, part)))
        }
        Question::Content { side, range } => content(client, reader, *side, *range),
        Question::Launch { function } => launched(client, reader, *function),
        Question::Table { parent } => {
            let named = Named {
                parent: *parent,
                device: 0,
                pad: 0,
            };
            let body = [named.as_bytes(), b"table\0"].concat();
            let (status, found) = client.ask(Op::GetGlobal, &body)?;
            match Range::read_from_prefix(&found) {
                Ok((range, _)) if status.is_ok() => content(client, reader, Side::Device, range),
                _ => Ok((status, Vec::new())),
            }
        }
    }
}

fn launched(client: &mut Client, reader: Reader, function: u64) -> Result<Answer, Sent> {
    let body = launch(function, reader.stream, 1, SAFE_PARAMS);
    submitted(client, |peer| {
        peer.post(Op::Launch, &body, &[0x11; SAFE_PARAMS])?;
        peer.finish(reader.stream).map(|()| Vec::new())
    })
}

fn content(client: &mut Client, reader: Reader, side: Side, range: Range) -> Result<Answer, Sent> {
    // Other sessions work meanwhile.
    if side == Side::Device && client.shares_memory {
        return Ok((CUDA_SUCCESS, Vec::new()));
    }
    submitted(client, |peer| {
        let from = match side {
            Side::Device => range.start,
            _ => {
                let (to, stream) = (reader.scratch.start, reader.stream);
                let body = copy(Side::Device, to, side, range.start, range.len, stream);
                peer.post(Op::Copy, &body, &[])?;
                to
            }
        };
        peer.read(reader.stream, from, range.len as usize)
    })
}

/// Sets the reader's memory to a value; whether it can be read.
///
/// # Errors
/// The session's end, or no answer.
pub fn store(client: &mut Client, reader: Reader, value: u32) -> Result<Option<String>, Sent> {
    let (to, bytes) = (reader.scratch.start, 1024);
    let (status, found) = submitted(client, |peer| {
        let body = memset(to, value, bytes / 4, reader.stream);
        peer.post(Op::Memset, &body, &[])?;
        peer.read(reader.stream, to, bytes as usize)
    })?;
    let expected = value.to_le_bytes().repeat(bytes as usize / 4);
    let is_right = status.is_ok() && found == expected;
    Ok((!is_right).then(|| {
        let at = found.iter().zip(&expected).position(|(one, other)| one != other);
        let found = found.get(at.unwrap_or_default()..).unwrap_or_default();
        let some = &found[..found.len().min(16)];
        format!("a memset of its memory with {value:#x} cannot be read: {status}, from byte {at:?} on {some:x?}")
    }))
}

/// What comes of messages in a stream, but for errors of those before.
fn submitted(
    client: &mut Client,
    submit: impl FnOnce(&mut Peer) -> Status<Vec<u8>>,
) -> Result<Answer, Sent> {
    let settled = client.settle();
    if settled != Sent::Fine {
        return Err(settled);
    }
    let _ = client.peer.posted_error();
    let outcome = submit(&mut client.peer);
    if let Some(status) = client.peer.ended() {
        return Err(Sent::Ended(status));
    }
    match outcome {
        Ok(bytes) => Ok((CUresult(0), bytes)),
        Err(CUDA_ERROR_TIMEOUT) => Err(Sent::Stuck),
        Err(status) => Ok((status, Vec::new())),
    }
}

fn ask<T: IntoBytes + Immutable>(op: Op, body: &T) -> Question {
    Question::Ask {
        op,
        body: body.as_bytes().to_vec(),
        from: 0,
    }
}

fn some(client: &Client, kind: Kind) -> Vec<u64> {
    let all = client.all(kind);
    all[all.len().saturating_sub(MOST_OBJECTS)..].to_vec()
}

fn questions(client: &Client) -> Vec<Question> {
    let mut all = of_safe_kernels();
    of_devices(&mut all);
    of_images(client, &mut all);
    of_streams(client, &mut all);
    of_parts(client, &mut all);
    of_graphs(client, &mut all);
    of_memory(client, &mut all);
    all
}

/// Of what [`Client::prepare`] loads.
fn of_safe_kernels() -> Vec<Question> {
    let launch = |index| Question::Launch {
        function: Handle::new(Kind::Function, 1, index).0,
    };
    let parent = Handle::new(Kind::Module, 1, 0).0;
    vec![launch(0), launch(1), Question::Table { parent }]
}

fn of_devices(all: &mut Vec<Question>) {
    for device in 0..DEVICES {
        // Free memory is everybody's: the total comes behind it.
        let attach = Attach { device, flags: 0 };
        all.push(Question::Ask {
            op: Op::MemInfo,
            body: attach.as_bytes().to_vec(),
            from: size_of::<u64>(),
        });
        for limit in 0..10 {
            let body = Limit {
                value: 0,
                limit,
                device,
            };
            all.push(ask(Op::GetLimit, &body));
        }
    }
}

fn of_images(client: &Client, all: &mut Vec<Question>) {
    for kind in [Kind::Module, Kind::Library] {
        for parent in some(client, kind) {
            let named = Named {
                parent,
                device: 0,
                pad: 0,
            };
            all.push(ask(Op::EnumerateFunctions, &named));
        }
    }
    for function in some(client, Kind::Function) {
        for attribute in 0..16 {
            let body = FunctionAttribute {
                function,
                attribute,
                value: 0,
            };
            all.push(ask(Op::GetFunctionAttribute, &body));
        }
        for kind in 0..2 {
            let body = Occupancy {
                function,
                shared: 1,
                block: 32,
                flags: 0,
                kind,
                pad: 0,
            };
            all.push(ask(Op::Occupancy, &body));
        }
    }
}

fn of_streams(client: &Client, all: &mut Vec<Question>) {
    for object in some(client, Kind::Stream) {
        all.push(ask(Op::CaptureState, &Object { object }));
    }
    let events = match client.shares_events {
        // Other sessions may record them meanwhile.
        true => Vec::new(),
        false => some(client, Kind::Event),
    };
    for object in &events {
        all.push(ask(Op::EventQuery, &Object { object: *object }));
    }
    for pair in events.windows(2) {
        let body = EventPair {
            start: pair[0],
            end: pair[1],
        };
        // Times are rounded: whether there is one has to stay.
        all.push(Question::Ask {
            op: Op::EventElapsed,
            body: body.as_bytes().to_vec(),
            from: size_of::<u64>(),
        });
    }
}

fn of_parts(client: &Client, all: &mut Vec<Question>) {
    for green in some(client, Kind::GreenContext).into_iter().chain([0]) {
        let body = ResourceQuery {
            green,
            device: 0,
            kind: CU_DEV_RESOURCE_TYPE_SM,
        };
        // The token may be a new one.
        all.push(Question::Ask {
            op: Op::ResourceQuery,
            body: body.as_bytes().to_vec(),
            from: size_of::<u32>(),
        });
    }
}

fn of_graphs(client: &Client, all: &mut Vec<Question>) {
    let (graphs, nodes) = (some(client, Kind::Graph), some(client, Kind::GraphNode));
    let list = |object: u64, what: u32| {
        let body = GraphList {
            object,
            what,
            first: 0,
            most: LIST_MOST,
            pad: 0,
        };
        ask(Op::GraphList, &body)
    };
    for graph in graphs {
        all.extend((0..3).map(|what| list(graph, what)));
    }
    for node in &nodes {
        let object = Object { object: *node };
        all.push(ask(Op::GraphNodeKind, &object));
        all.push(ask(Op::GraphNodeGet, &object));
        all.extend((3..5).map(|what| list(*node, what)));
        for id in 0..20 {
            let body = GraphAttribute {
                node: *node,
                id,
                set: 0,
                value: [0; 8],
            };
            all.push(ask(Op::GraphAttribute, &body));
        }
    }
    for exec in some(client, Kind::GraphExec) {
        all.push(ask(Op::GraphExecFlags, &Object { object: exec }));
        for node in &nodes {
            let body = GraphEnabled {
                exec,
                node: *node,
                set: 0,
                enabled: 0,
            };
            all.push(ask(Op::GraphEnabled, &body));
        }
    }
}

fn of_memory(client: &Client, all: &mut Vec<Question>) {
    let place = |device: u32| Location {
        kind: CU_MEM_LOCATION_TYPE_DEVICE,
        id: device as i32,
    };
    for range in &client.ranges {
        let part = Range {
            start: range.start,
            len: range.len.min(MOST_BYTES),
        };
        if part.len == 0 {
            continue;
        }
        for side in [Side::Device, Side::Host] {
            all.push(Question::Content { side, range: part });
        }
        for attribute in 0..22 {
            // The driver names the device for which pinned memory was first used; clients know their own.
            if attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL && is_host(range.start) {
                continue;
            }
            let body = PointerQuery {
                pointer: range.start,
                attribute,
                pad: 0,
            };
            all.push(ask(Op::PointerAttribute, &body));
        }
        for device in 0..DEVICES {
            let body = GetAccess {
                address: range.start,
                location: place(device),
            };
            all.push(ask(Op::GetAccess, &body));
        }
    }
    for pool in some(client, Kind::MemPool) {
        for attribute in 1..9 {
            // A server may keep freed memory in a pool for a while, which the next one does not have.
            if attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT {
                continue;
            }
            let body = PoolAttribute {
                pool,
                value: 0,
                attribute,
                pad: 0,
            };
            all.push(ask(Op::PoolGetAttribute, &body));
        }
        for device in 0..DEVICES {
            let body = PoolAccess {
                pool,
                count: 1,
                pad: 0,
            };
            let access = Access {
                location: place(device),
                flags: 0,
                pad: 0,
            };
            all.push(Question::Ask {
                op: Op::PoolGetAccess,
                body: [body.as_bytes(), access.as_bytes()].concat(),
                from: 0,
            });
        }
    }
}
