# Starts the worker of a machine, ends it, or reports its state. `cluster.py` writes the variables
# before it: action, files, listening (the worker's command), secret, mark, seconds.
#
# The folder is of the machine's user. It holds the token, the log and the process number of each
# worker, under the machine's name and the worker's place, so several cluster files may use one
# machine. The system may give the number of an ended process to another process, so `runs` also
# compares the words of its command line. A process at its end has lost its words and still has its
# port, so only the system's list says whether it is gone.
umask 077
cd || exit 1
folder="$HOME/.local/state/lightning-hetero"
pid="$folder/$files.pid"; log="$folder/$files.log"; token="$folder/$files.token"
say() { echo "$mark $*"; }
is_gone() { case "$(ps -o stat= -p "$(cat "$pid")" 2>/dev/null)" in ""|Z*) ;; *) false ;; esac; }
runs() { [ -f "$pid" ] && ps -ww -o args= -p "$(cat "$pid")" 2>/dev/null | grep -qF "$token"; }
finish() { say "$1"; rm -f "$token" "$pid"; exit; }
wait_for_end() { for second in $(seq "$seconds"); do is_gone && finish ended; sleep 1; done; }

case "$action" in
up)
  if runs; then say running "$(cat "$pid")"; exit; fi
  mkdir -p "$folder" && printf '%s\n' "$secret" > "$token" || { say fault the folder "$folder"; exit; }
  : > "$log"
  unset secret # the login may have exported the name
  nohup sh -c "$listening" sh "$token" >> "$log" 2>&1 < /dev/null &
  echo $! > "$pid"
  for second in $(seq "$seconds"); do
    if grep -q "listening on" "$log"; then say started "$(cat "$pid")"; exit; fi
    kill -0 "$(cat "$pid")" 2>/dev/null || break
    sleep 1
  done
  say fault "$(tail -n 4 "$log" | tr '\n' ' ')"
  ;;
down)
  runs || finish stopped
  kill -TERM "$(cat "$pid")"
  wait_for_end
  say draining "$(cat "$pid")"
  ;;
now)
  runs || finish stopped
  kill -TERM "$(cat "$pid")"; sleep 1; kill -TERM "$(cat "$pid")" 2>/dev/null
  wait_for_end
  kill -KILL "$(cat "$pid")"; finish ended
  ;;
status)
  if runs; then say running "$(cat "$pid")"; else say stopped; fi
  ;;
esac
