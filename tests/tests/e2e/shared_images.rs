//! Images that several clients load: which of them the driver has once, and that no client sees what another does.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::context::LimitMemory;
use mpsshim_proto::message::{
    FUNCTION_PRINTS, FunctionAttribute, FunctionInfo, GetFunction, Named, Op, Range, Value,
};
use mpsshim_tests::control_daemon::{Place, wait_until};
use mpsshim_tests::peer::{Loaded, PTX, Peer, Status, fill_params, launch};
use mpsshim_tests::scene::{control, daemon_with};
use std::collections::HashSet;

const SHARED: CUfunction_attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
const CARVEOUT: CUfunction_attribute = CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;

fn place() -> Place {
    daemon_with(&[("MPSSHIM_LOG", "debug")])
}

/// How often the driver got an image, and how often a client was given another's.
fn loads(place: &Place) -> (usize, usize) {
    let log = place.log("server.log");
    (
        log.matches("an image: loaded").count(),
        log.matches("an image: another client's").count(),
    )
}

/// A client with the module.
struct Client(Loaded);

impl Client {
    fn new(place: &Place, text: &str) -> Client {
        Client(Loaded::connect(&control(place), text))
    }

    /// One with a limit of device memory.
    fn limited(place: &Place, text: &str, bytes: u64) -> Client {
        let mut peer = Peer::connect(&control(place)).expect("a session");
        peer.attach().expect("attach");
        let limit = LimitMemory {
            device: 0,
            pad: 0,
            bytes,
        };
        peer.post(Op::LimitMemory, &limit, &[]).expect("a limit");
        let module = peer.module(text.as_bytes()).expect("a module");
        Client(Loaded {
            module,
            function: peer.function(module, "fill").expect("a function"),
            memory: peer.memory(2 << 20).expect("memory"),
            stream: peer.stream().expect("a stream"),
            peer,
        })
    }

    /// Runs the kernel and looks at what it wrote.
    fn computes(&mut self, seed: u32) {
        let params = fill_params(self.0.memory.start, seed, 1);
        let body = launch(self.0.function, self.0.stream, 1, params.len());
        self.0
            .peer
            .post(Op::Launch, &body, &params)
            .expect("launch");
        let read = self.0.peer.read(self.0.stream, self.0.memory.start, 128);
        let expected: Vec<u8> = (0..32u32).flat_map(|i| (i * seed).to_le_bytes()).collect();
        assert_eq!(read, Ok(expected));
    }

    fn attribute(&mut self, attribute: CUfunction_attribute) -> i32 {
        let body = FunctionAttribute {
            function: self.0.function,
            attribute,
            value: 0,
        };
        let value: Value = self
            .0
            .peer
            .ask(Op::GetFunctionAttribute, &body, &[])
            .expect("an attribute");
        value.value as i32
    }

    fn set(&mut self, attribute: CUfunction_attribute, value: i32) -> Status {
        let body = FunctionAttribute {
            function: self.0.function,
            attribute,
            value,
        };
        self.0
            .peer
            .ask_as(0, Op::SetFunctionAttribute, &body, &[])
            .map(drop)
    }

    fn variable(&mut self, name: &str) -> Range {
        let body = Named {
            parent: self.0.module,
            ..Named::default()
        };
        let name = [name.as_bytes(), b"\0"].concat();
        self.0
            .peer
            .ask(Op::GetGlobal, &body, &name)
            .expect("a variable")
    }
}

fn with(declaration: &str) -> String {
    PTX.replace(
        ".address_size 64\n",
        &format!(".address_size 64\n{declaration}\n"),
    )
}

/// As [`with`], with a kernel that writes the variable `counter`.
fn with_counter(declaration: &str) -> String {
    let kernel = ".visible .entry write()
        {
            .reg .u64 %rd<2>;
            .reg .u32 %r<2>;
            mov.u64 %rd1, counter;
            mov.u32 %r1, 1;
            st.global.u32 [%rd1], %r1;
            ret;
        }";
    with(&format!("{declaration}\n{kernel}"))
}

#[test]
fn code_without_variables_is_loaded_once() {
    let place = place();
    let mut first = Client::new(&place, PTX);
    let before = loads(&place);
    let mut second = Client::new(&place, PTX);
    assert_eq!(loads(&place), (before.0, before.1 + 1));
    first.computes(3);
    second.computes(5);
    // The first may go; the second keeps what both had.
    first.0.unload();
    second.computes(7);
    drop(first);
    second.computes(9);
    let mut third = Client::new(&place, PTX);
    third.computes(11);
    assert_eq!(loads(&place), (before.0, before.1 + 2));
    // When nobody has it, it is gone; the next one loads it.
    drop((second, third));
    wait_until("both have gone", || {
        place.log("server.log").contains("contexts is 0.")
    });
    let mut again = Client::new(&place, PTX);
    again.computes(13);
}

#[test]
fn attributes_are_each_clients_own() {
    let place = place();
    let (mut first, mut second) = (Client::new(&place, PTX), Client::new(&place, PTX));
    let usual = first.attribute(SHARED);
    let before = loads(&place).0;
    // Both ask for the same: they stay together, though one has used the function before.
    assert_eq!(second.set(SHARED, 60_000), Ok(()));
    assert_eq!(first.attribute(SHARED), usual);
    assert_eq!(second.attribute(SHARED), 60_000);
    assert_eq!(first.set(SHARED, 60_000), Ok(()));
    assert_eq!(first.attribute(SHARED), 60_000);
    let mut third = Client::new(&place, PTX);
    assert_eq!(third.attribute(SHARED), usual);
    assert_eq!(third.set(SHARED, 60_000), Ok(()));
    assert_eq!(third.set(CARVEOUT, 50), Ok(()));
    assert_eq!(third.attribute(SHARED), 60_000);
    assert_eq!(third.attribute(CARVEOUT), 50);
    assert_eq!(first.attribute(CARVEOUT), -1);
    for (client, seed) in [(&mut first, 2), (&mut second, 4), (&mut third, 6)] {
        client.computes(seed);
    }
    // What the driver refuses changes nothing.
    assert_eq!(third.set(SHARED, 1 << 30), Err(CUDA_ERROR_INVALID_VALUE));
    assert_eq!(third.attribute(SHARED), 60_000);
    third.computes(8);
    // Not more copies than there are ways to set it: none, one attribute, two.
    assert!(loads(&place).0 - before <= 2);
    drop(third);
    let mut fourth = Client::new(&place, PTX);
    assert_eq!(fourth.set(CARVEOUT, 50), Ok(()));
    assert_eq!(fourth.attribute(SHARED), usual);
    fourth.computes(10);
    first.computes(12);
}

#[test]
fn constants_are_each_clients_own() {
    let place = place();
    let text = with(".visible .const .align 4 .b8 table[16];");
    let (mut first, mut second) = (Client::new(&place, &text), Client::new(&place, &text));
    assert_eq!(loads(&place).1, 1);
    // Used before and after one of them asks for the variable.
    second.computes(3);
    assert_eq!(second.set(SHARED, 60_000), Ok(()));
    let (a, b) = (first.variable("table"), second.variable("table"));
    assert_ne!(a.start, b.start);
    for (client, range, value) in [(&mut first, a, 1u8), (&mut second, b, 2)] {
        client
            .0
            .peer
            .write(client.0.stream, range.start, &[value; 16])
            .expect("written");
        client.computes(value.into());
    }
    for (client, range, value) in [(&mut first, a, 1u8), (&mut second, b, 2)] {
        let read = client.0.peer.read(client.0.stream, range.start, 16);
        assert_eq!(read, Ok(vec![value; 16]));
    }
    // What they set before and set now is in force.
    assert_eq!(second.attribute(SHARED), 60_000);
    for (client, bytes) in [(&mut first, 50_000), (&mut second, 70_000)] {
        assert_eq!(client.set(SHARED, bytes), Ok(()));
        assert_eq!(client.attribute(SHARED), bytes);
        client.computes(5);
    }
    // Nobody comes to what one of them has for itself.
    let mut third = Client::new(&place, &text);
    let c = third.variable("table");
    assert!(![a.start, b.start].contains(&c.start));
}

#[test]
fn code_with_variables_is_not_shared() {
    let place = place();
    let text = with_counter(".visible .global .align 4 .u32 counter;");
    let (mut first, mut second) = (Client::new(&place, &text), Client::new(&place, &text));
    assert_eq!(loads(&place).1, 0);
    assert_ne!(
        first.variable("counter").start,
        second.variable("counter").start
    );
}

/// How many images were kept after their last client had left.
fn kept(place: &Place) -> usize {
    place
        .log("server.log")
        .matches("an image: kept for the next client")
        .count()
}

#[test]
fn a_variable_is_as_new_for_the_next_client() {
    const DECLARED: &str = ".visible .global .align 4 .u32 counter = 7;
        .visible .global .align 4 .b8 zeros[100000];
        .visible .const .align 4 .b8 table[4] = {1, 2, 3, 4};";
    let place = place();
    let text = with(DECLARED);
    // One client stays, so that its server does.
    let _stays = Client::new(&place, PTX);
    let mut addresses = Vec::new();
    for round in 1..=3 {
        let before = loads(&place);
        let mut client = Client::new(&place, &text);
        let found = match round {
            1 => (before.0 + 1, before.1),
            _ => (before.0, before.1 + 1),
        };
        assert_eq!(loads(&place), found, "round {round}");
        assert_ne!(client.attribute(SHARED), 50_000);
        let ranges = ["counter", "zeros", "table"].map(|name| client.variable(name));
        let [counter, zeros, table] = &ranges;
        let mut read = |range: &Range| {
            let peer = &mut client.0.peer;
            let read = peer.read(client.0.stream, range.start, range.len as usize);
            read.expect("a variable's content")
        };
        assert_eq!(read(counter), 7u32.to_le_bytes());
        assert!(read(zeros).iter().all(|byte| *byte == 0) && zeros.len == 100_000);
        assert_eq!(read(table), [1, 2, 3, 4]);
        for range in &ranges {
            let peer = &mut client.0.peer;
            for at in [range.start, range.start + range.len - 4] {
                let written = peer.write(client.0.stream, at, &[round; 4]);
                written.expect("a variable is written");
            }
        }
        assert_eq!(client.set(SHARED, 50_000), Ok(()));
        client.computes(round.into());
        addresses.push(ranges.map(|range| range.start));
        let before = kept(&place);
        drop(client);
        wait_until("it is kept", || kept(&place) > before);
    }
    assert!(addresses.iter().all(|one| *one == addresses[0]));
}

#[test]
fn several_clients_at_a_time_have_their_own_variables() {
    let place = place();
    let text = with_counter(".visible .global .align 4 .u32 counter = 7;");
    let _stays = Client::new(&place, PTX);
    for round in 0..2 {
        let before = loads(&place);
        let mut clients: Vec<_> = (0..3).map(|_| Client::new(&place, &text)).collect();
        let found = loads(&place);
        match round {
            0 => assert_eq!(found, (before.0 + 3, before.1)),
            _ => assert_eq!(found, (before.0, before.1 + 3)),
        }
        let addresses: HashSet<u64> = clients
            .iter_mut()
            .map(|client| client.variable("counter").start)
            .collect();
        assert_eq!(addresses.len(), 3);
        let before = kept(&place);
        drop(clients);
        wait_until("they are kept", || kept(&place) == before + 3);
    }
}

#[test]
fn what_is_unloaded_is_the_next_clients_once_nothing_of_it_runs() {
    let place = place();
    let text = with_counter(".visible .global .align 4 .u32 counter = 7;");
    let mut first = Client::new(&place, &text);
    let load = |client: &mut Client, expected: (usize, usize)| {
        let before = loads(&place);
        let module = client.0.peer.module(text.as_bytes()).expect("a module");
        let found = loads(&place);
        assert_eq!((found.0 - before.0, found.1 - before.1), expected);
        client.0.module = module;
        client.0.function = client.0.peer.function(module, "fill").expect("a function");
    };
    // As programs unload at their end, all done.
    first.computes(3);
    let before = kept(&place);
    first.0.unload();
    wait_until("it is kept", || kept(&place) > before);
    load(&mut first, (0, 1));
    // What runs may write to its variables.
    let params = fill_params(first.0.memory.start, 3, 100_000);
    let body = launch(first.0.function, first.0.stream, 1, params.len());
    let peer = &mut first.0.peer;
    peer.post(Op::Launch, &body, &params).expect("launch");
    first.0.unload();
    load(&mut first, (1, 0));
}

#[test]
fn what_is_loaded_once_more_for_a_client_is_within_its_limit() {
    let place = place();
    let text = with(".global .align 4 .b8 $str[16777216];");
    let mut first = Client::new(&place, &text);
    let mut second = Client::limited(&place, &text, 24 << 20);
    assert_eq!(loads(&place).1, 1, "they share it");
    first.computes(3);
    let before = loads(&place);
    assert_eq!(second.set(SHARED, 60_000), Err(CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(loads(&place), before);
    second.computes(5);
    // The other one may.
    let usual = second.attribute(SHARED);
    assert_eq!(first.set(SHARED, 60_000), Ok(()));
    assert_eq!(second.attribute(SHARED), usual);
    first.computes(7);
}

/// An entry of a fatbin: text for the driver's compiler.
fn entry(content: &[u8], whole: usize, target: u32, flags: u64) -> Vec<u8> {
    let size = content.len().next_multiple_of(8);
    let mut bytes = vec![0; 64];
    bytes[..2].copy_from_slice(&1u16.to_le_bytes());
    bytes[4..8].copy_from_slice(&64u32.to_le_bytes());
    bytes[8..16].copy_from_slice(&(size as u64).to_le_bytes());
    bytes[16..20].copy_from_slice(&(content.len() as u32).to_le_bytes());
    bytes[28..32].copy_from_slice(&target.to_le_bytes());
    bytes[40..48].copy_from_slice(&flags.to_le_bytes());
    bytes[56..64].copy_from_slice(&(whole as u64).to_le_bytes());
    bytes.extend_from_slice(content);
    bytes.resize(64 + size, 0);
    bytes
}

#[test]
fn printing_code_is_not_shared_though_it_is_compressed() {
    const ZSTD: u64 = 0x8000;
    let place = place();
    for (name, expected) in [("vprintf", FUNCTION_PRINTS), ("vanished", 0)] {
        // softgpu runs the newer text, which is not compressed.
        let older =
            format!("// 0123456789abcdefvprin 0123456789abcdefvanis 0123456789abcdef{name}\n{PTX}");
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let packed = ruzstd::encoding::compress_to_vec(older.as_bytes(), level);
        let plain = packed.windows(name.len()).any(|at| at == name.as_bytes());
        assert!(!plain, "the name has to be packed");
        let entries = [
            entry(&packed, older.len(), 50, ZSTD),
            entry(PTX.as_bytes(), 0, 70, 0),
        ]
        .concat();
        let mut image = vec![0; 16];
        image[..4].copy_from_slice(&0xBA55_ED50u32.to_le_bytes());
        image[6..8].copy_from_slice(&16u16.to_le_bytes());
        image[8..16].copy_from_slice(&(entries.len() as u64).to_le_bytes());
        image.extend(entries);

        let before = loads(&place);
        let mut clients = [(); 2].map(|()| {
            let mut peer = Peer::connect(&control(&place)).expect("a session");
            peer.attach().expect("attach");
            let module = peer.module(&image).expect("a module");
            (peer, module)
        });
        let shared = usize::from(expected == 0);
        assert_eq!(loads(&place), (before.0 + 2 - shared, before.1 + shared));
        for (peer, module) in &mut clients {
            let body = GetFunction {
                parent: *module,
                function: peer.handle(Kind::Function),
                device: 0,
                pad: 0,
            };
            let info: FunctionInfo = peer.ask(Op::GetFunction, &body, b"fill\0").expect("it");
            assert_eq!(info.flags, expected);
        }
    }
}
