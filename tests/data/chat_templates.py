"""Chat templates of published models, shortened to the parts that keep or drop content."""

# Qwen2.5: a system message of its own, tools as JSON, calls in tags; other roles are left out
QWEN2_5 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are Qwen.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Qwen3: thoughts of turns before the last question are left out, those behind it are written anew
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Llama 3.1: everything is trimmed, results of tools are JSON, a turn with a call is the call alone
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# DeepSeek-R1-Distill: one system message, thoughts cut off, calls only where the content is null, arguments as a text
R1 = """{% set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}
{%- endfor %}{{bos_token}}{{ns.system}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{'<|User|>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{'<|Assistant|><call>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '</call>'}}
{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{{'<output>' + message['content'] + '</output>'}}{%- endif %}
{%- endfor -%}{% if add_generation_prompt %}{{'<|Assistant|>'}}{% endif %}"""

# Gemma: a system message begins the first turn of the user, the assistant is called model
GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception("roles must alternate") }}{%- endif -%}
{%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}{{ message['content'] | trim }}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

# Mistral: the system message stands before the last question
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set messages = messages[1:] %}{%- endif %}{{- bos_token }}
{%- for message in messages %}
{%- if message["role"] == "user" %}{{- "[INST] " }}
{%- if loop.last and system is defined %}{{- system + "\\n\\n" }}{%- endif %}{{- message["content"] + "[/INST]" }}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + "</s>" }}
{%- else %}{{- raise_exception("only user and assistant") }}{%- endif %}{%- endfor %}"""
