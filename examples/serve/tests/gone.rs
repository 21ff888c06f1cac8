//! Clients that hang up, stall, or come in numbers leave nothing.

use crate::{MOE, NOVEL, body, nothing_is_left, serve};
use pikv_serve::Options;
use pikv_serve::client::complete;
use pikv_serve::load::{Load, run};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn clients_that_hang_up_free_everything() {
    let server =
        serve(Options { budget: 8 << 20, parking: 8 << 20, prefixes: 2 << 20, ..Options::default() });
    let streams = json!({"stream": true});
    // After the first tokens, after the head alone, before the answer, and in the middle of the body.
    let mut reply = complete(server.address, &body(&NOVEL[..300], 1500, streams.clone())).unwrap();
    reply.body.events().unwrap();
    drop(reply);
    drop(complete(server.address, &body(&NOVEL[..1000], 1000, streams)).unwrap());
    for part in [1, 2] {
        let sent = body(&NOVEL[..900], 1000, json!({})).to_string();
        let mut stream = TcpStream::connect(server.address).unwrap();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", sent.len())
            .unwrap();
        stream.write_all(&sent.as_bytes()[..sent.len() / part]).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        stream.shutdown(Shutdown::Both).unwrap();
    }
    let began = Instant::now();
    nothing_is_left(&server);
    // Sooner than their answers would have been finished.
    let counts = &server.clear_prefixes().unwrap().counts;
    assert_eq!((counts.hung_up, counts.finished), (3, 0), "{counts:?} after {:?}", began.elapsed());
}

#[test]
fn connections_on_which_nothing_moves_are_cut_off() {
    let options = Options { deadline: Duration::from_millis(400), connections: 2, ..Options::default() };
    let server = serve(options);
    // One never sends its head, the other never its body. A third waits until there is room.
    let mut stalled: Vec<TcpStream> =
        ["POST /v1", "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"]
            .map(|sent| {
                let mut stream = TcpStream::connect(server.address).unwrap();
                stream.write_all(sent.as_bytes()).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                stream
            })
            .into();
    let reply = complete(server.address, &body("It is", 1, json!({}))).unwrap();
    assert_eq!(reply.status, 200);
    drop(reply);
    for stream in &mut stalled {
        let mut rest = Vec::new();
        // Its end comes, perhaps after an error that says why.
        let _ = stream.read_to_end(&mut rest);
        let rest = String::from_utf8_lossy(&rest);
        assert!(rest.is_empty() || rest.contains("deadline_exceeded"), "{rest}");
    }
    nothing_is_left(&server);
}

/// Requests that come byte by byte have the time of a connection on which nothing moves, in all: they do not keep others out for ever.
#[test]
fn requests_that_drip_are_cut_off() {
    let options = Options { deadline: Duration::from_millis(400), connections: 2, ..Options::default() };
    let server = serve(options);
    let began = Instant::now();
    let drip = |head: &str| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        // More bytes than the deadline has time for.
        (0..400).find(|_| {
            std::thread::sleep(Duration::from_millis(20));
            stream.write_all(b"a").is_err()
        })
    };
    std::thread::scope(|scope| {
        let head = scope.spawn(|| drip("POST /v1/completions HTTP/1.1\r\nx: "));
        let rest =
            scope.spawn(|| drip("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n"));
        // It waits until there is room.
        let reply = complete(server.address, &body("It is", 1, json!({}))).unwrap();
        assert_eq!(reply.status, 200);
        assert!(head.join().unwrap().is_some() && rest.join().unwrap().is_some());
    });
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    nothing_is_left(&server);
}

#[test]
fn a_client_that_does_not_read_holds_nobody_up() {
    let server = serve(Options::default());
    let stalled: Vec<_> = (0..4)
        .map(|_| complete(server.address, &body(&NOVEL[..50], 60, json!({"stream": true}))).unwrap())
        .collect();
    let reply = complete(server.address, &body("It is", 4, json!({}))).unwrap();
    assert_eq!(reply.status, 200);
    // Their sequences are gone once their answers are whole, read or not.
    nothing_is_left(&server);
    assert_eq!(server.look().unwrap().counts.finished, 5);
    drop(stalled);
}

#[test]
fn a_load_of_clients_sees_documented_errors_only() {
    let (clients, seconds) = if pikv_test::full() { (64, 60) } else { (12, 2) };
    let load = Load {
        clients,
        seconds: Duration::from_secs(seconds),
        prompt: 300,
        answer: 12,
        system: 128,
        hang_up: 4,
        ..Load::default()
    };
    // Room for a third.
    let budget = (clients as u64 / 3) * (900 << 10);
    let options = Options { budget, parking: budget, prefixes: budget / 4, ..Options::default() };
    let server = serve(options);
    let seen = run(server.address, &MOE.name, &NOVEL, &load);
    assert_eq!(seen.undocumented(), 0, "{:?}", seen.errors);
    assert!(seen.answers > 0 && seen.hung_up > 0, "{seen:?}");
    nothing_is_left(&server);
}
