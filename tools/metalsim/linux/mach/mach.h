// Types of the Mach kernel that metal-cpp names.
#pragma once
typedef int kern_return_t;
typedef unsigned task_id_token_t;
