//! The first packet of a connection to the control daemon.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mpsshim_proto::handshake::{MAGIC_CLIENT, MAGIC_UI, PROTOCOL_VERSION};
use mpsshim_control::greeting::{Greeting, read};

fuzz_target!(|packet: &[u8]| {
    match read(packet) {
        Greeting::Client(hello) => {
            assert_eq!(packet.len(), size_of_val(&*hello));
            assert_eq!(
                (hello.magic, hello.protocol),
                (MAGIC_CLIENT, PROTOCOL_VERSION)
            );
        }
        Greeting::Command(_, line) => assert_eq!(line.len() + MAGIC_UI.len(), packet.len()),
        Greeting::Server(Ok(_)) => {}
        Greeting::Server(Err(why)) => assert!(!why.to_string().is_empty()),
        Greeting::Unfit(why) => assert!(!why.to_string().is_empty()),
    }
});
