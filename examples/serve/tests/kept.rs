//! Answers that a server saved are found after it was stopped or killed.

use crate::{MOE, NOVEL, answer, body, nothing_is_left, serve};
use pikv::codec::Code;
use pikv_serve::client::{complete, send};
use pikv_serve::model::Model;
use pikv_serve::{Options, Server, Store};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder(std::env::temp_dir().join(format!("pikv-{name}-{}", std::process::id())))
    }

    fn bytes(&self) -> u64 {
        fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn kept(folder: &Folder) -> Options {
    Options { keep: Some(folder.0.clone()), ..Options::default() }
}

/// Tokens that the index found, and the text.
fn found(answer: &Value) -> (u64, &str) {
    let found = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (found.unwrap_or_else(|| panic!("{answer}")), answer["choices"][0]["text"].as_str().unwrap())
}

#[test]
fn what_a_server_answered_is_found_by_the_next() {
    for store in [Options::default().store, Store::Packed(Code::Int8)] {
        let folder = Folder::new("next");
        let options = Options { store, ..kept(&folder) };
        let asked = body(&NOVEL[..600], 40, json!({}));
        let first = serve(options.clone());
        let fresh = answer(&first, &asked);
        assert_eq!((found(&fresh).0, first.look().unwrap().counts.unsaved), (0, 0));
        nothing_is_left(&first);
        drop(first);
        // What is not a saved sequence is left alone, and what cannot be read does no harm.
        fs::write(folder.0.join("mine.safetensors"), [1; 100]).unwrap();
        fs::write(folder.0.join("broken.pikv-kept"), [1; 100]).unwrap();
        let second = serve(options.clone());
        let again = answer(&second, &asked);
        let most = if store == Options::default().store { 576 } else { 512 };
        assert_eq!(found(&again), (most, found(&fresh).1));
        // Prefixes of one key stay its own.
        let headers = "content-type: application/json\r\nauthorization: Bearer other\r\n";
        let other = send(second.address, "POST", "/v1/completions", asked.to_string().as_bytes(), headers);
        assert_eq!(found(&other.unwrap().json().unwrap()).0, 0);
        nothing_is_left(&second);
        drop(second);
        // Nor are they found by other weights, whose keys and values would be others.
        let mut model = Model::moe().unwrap();
        model.revision = "other weights".to_string();
        let third = Server::start(model.into(), options, ([127, 0, 0, 1], 0).into()).unwrap();
        assert_eq!(found(&answer(&third, &asked)).0, 0);
        nothing_is_left(&third);
        assert!(folder.0.join("mine.safetensors").exists());
    }
}

#[test]
fn the_oldest_files_make_room() {
    let folder = Folder::new("room");
    let options = Options { prefixes: 2 << 20, ..kept(&folder) };
    let server = serve(options.clone());
    let asked: Vec<Value> = (0..6).map(|i| body(&NOVEL[1000 * i..][..600], 2, json!({}))).collect();
    for asked in &asked {
        answer(&server, asked);
        assert!(folder.bytes() <= 2 << 20, "{}", folder.bytes());
    }
    drop(server);
    let server = serve(options);
    let found: Vec<bool> =
        asked.iter().rev().take(2).map(|asked| found(&answer(&server, asked)).0 > 0).collect();
    assert!(found[0], "the newest is there: {found:?}");
}

#[test]
fn nothing_is_kept_without_an_index() {
    let folder = Folder::new("none");
    let options = Options { prefixes: 0, ..kept(&folder) };
    let refused = Server::start(MOE.clone(), options, ([127, 0, 0, 1], 0).into()).err().unwrap();
    assert_eq!(refused.to_string(), "prefixes are kept only with an index");
}

/// The program, started; its address is the end of its first line.
fn start(folder: &Path) -> (Child, SocketAddr) {
    let mut server = Command::new(env!("CARGO_BIN_EXE_serve"))
        .args(["--address", "127.0.0.1:0", "--keep"])
        .arg(folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().rsplit('/').next().unwrap().parse();
    (server, address.unwrap_or_else(|_| panic!("{line:?}")))
}

/// Killed at any time, a server loses nothing that was answered whole.
#[test]
fn a_killed_server_loses_no_whole_answer() {
    let folder = Folder::new("killed");
    let (mut whole, mut next) = (Vec::<(Value, String)>::new(), 0);
    for round in 0..if pikv_test::full() { 20 } else { 4 } {
        let (mut server, address) = start(&folder.0);
        for (asked, text) in &whole {
            let again = complete(address, asked).unwrap().json().unwrap();
            assert_eq!((found(&again).0 > 0, found(&again).1), (true, text.as_str()), "round {round}");
        }
        std::thread::scope(|scope| {
            let killed = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300 + 37 * round));
                server.kill().unwrap();
                server.wait().unwrap();
            });
            // Until an answer does not come.
            loop {
                let asked = body(&NOVEL[700 * next..][..200], 3, json!({}));
                let reply = complete(address, &asked).and_then(|reply| reply.json());
                let Ok(reply) = reply else { break };
                whole.push((asked, found(&reply).1.to_string()));
                next += 1;
            }
            killed.join().unwrap();
        });
    }
    assert!(whole.len() > 4, "{}", whole.len());
}
